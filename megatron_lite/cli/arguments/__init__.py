"""The command line: one file of flags for each topic, and the parser that reads them."""
