"""With this folder on PYTHONPATH, Python starts without a network.

A connection to any other machine raises at once, instead of waiting for an answer.
"""

import socket

LOCAL = {"", "localhost", "127.0.0.1", "0.0.0.0", "::1", None}


def guard(function, host_of):
    """Let `function` through only for this machine's own addresses."""

    def guarded(*args, **kwargs):
        host = host_of(*args, **kwargs)
        if host not in LOCAL and host != socket.gethostname():
            raise OSError(f"the tests run without a network, and this asks for {host}")
        return function(*args, **kwargs)

    return guarded


def host_of_address(_, address):
    return address[0] if isinstance(address, tuple) else ""  # a path: a local socket


socket.getaddrinfo = guard(socket.getaddrinfo, lambda host, *_, **__: host)
for name in ("connect", "connect_ex"):
    method = getattr(socket.socket, name)
    setattr(socket.socket, name, guard(method, host_of_address))
