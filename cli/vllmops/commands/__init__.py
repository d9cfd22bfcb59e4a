"""The command line: a module for each command, a package for each noun with several."""
