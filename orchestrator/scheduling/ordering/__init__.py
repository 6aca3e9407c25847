"""The order in which waiting runs are tried: policies by name; decayed usage for fair shares."""
