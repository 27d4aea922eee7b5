"""Everything ZeroMQ: the codec, the messages, the sockets, and both ends of the control connection."""
