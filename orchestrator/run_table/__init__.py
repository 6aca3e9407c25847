"""The runs table: a query language, columns of any value, order, groups and saved views."""
