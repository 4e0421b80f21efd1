"""How a server of a run proves that it knows the run's secret, without showing it. Used on both sides.

The proof names the port on which the server was asked, so that a process on another port cannot pass on the proof of a
real server as its own. Standard library only, since the server's environment does not have Cohort.
"""

import hmac

PROOF_PATH = "/cohort/proof"  # GET with ?nonce=NONCE; needs no secret
PROOF_CHARACTERS = 64


def server_proof(secret: bytes, nonce: bytes, port: int) -> bytes:
    """Return HMAC-SHA256 of a nonce and the server's port, in hexadecimal."""
    return hmac.new(secret, b"%d %s" % (port, nonce), "sha256").hexdigest().encode()
