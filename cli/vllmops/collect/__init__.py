"""Facts about a server, each from one source. A package for each kind of source; no judgement."""
