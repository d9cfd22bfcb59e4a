"""The place and the limits of the agents' Unix sockets, for both ends."""

DIRECTORY = "agents"  # below the state directory
PATH_BYTES = 107  # sun_path of unix(7), without its final NUL
BODY_BYTES = 4 << 20  # of a request; some 60,000 cache keys
