"""Reports as pages draw them: text with its blocks, and the data of these. Views are in `views`."""
