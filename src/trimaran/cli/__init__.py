"""The command line: one file per verb, imported when it is used."""
