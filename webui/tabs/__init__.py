"""What each tab of the run page adds: one module per tab, `content(facts, request)` → template
words.
"""
