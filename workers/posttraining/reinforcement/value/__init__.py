"""The value model of PPO: its module, its updates, and advantages from its values."""
