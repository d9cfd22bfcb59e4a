"""One file with everything that a bug report needs, without secrets."""
