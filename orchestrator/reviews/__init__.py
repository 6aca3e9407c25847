"""People's decisions about data: reviews of lines, blind votes on two models' answers."""
