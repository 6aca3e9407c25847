"""The code of script runs at their submit: a git commit plus diff, else the program's files."""
