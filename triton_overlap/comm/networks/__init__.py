"""Networks, each in its file; see ``comm/network.py``."""
