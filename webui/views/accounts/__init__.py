"""Pages of login, the account, teams and usage."""
