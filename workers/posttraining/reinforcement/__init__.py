"""Policy optimization: sample answers, score them, update the policy from them."""
