"""Pages of data: files, data sets, reviews, comparisons of models."""
