"""The part of OpenSSL that ``tls`` uses, called directly.

Not through Python's ``ssl``, for two reasons: its streams need the interpreter's lock (``tls/handshake`` says why that will not
do), and it has no pre-shared keys before Python 3.13. Everything here is documented, exported C interface of
OpenSSL 1.1.1 and later; the library is the one that Python's own ``ssl`` has loaded, where that is a shared one.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import ssl  # loads the library

from ..errors import NotSupported

VERIFY_PEER, FAIL_IF_NO_PEER_CERT = 1, 2
TLS1_3 = 0x0304
FILETYPE_PEM = 1
ERROR_SSL, ERROR_WANT_READ, ERROR_WANT_WRITE, ERROR_SYSCALL = 1, 2, 3, 5
REASON_MASK, WRONG_VERSION_NUMBER = 0xFFF, 267
X509_V_OK = 0
PARTIAL_WRITE_AND_MOVING_BUFFER = 0x1 | 0x2  # modes
IGNORE_UNEXPECTED_EOF = 1 << 7  # an option
CTRL_MODE, CTRL_READ_AHEAD, CTRL_SESSION_CACHE, CTRL_MIN_PROTO, CTRL_MAX_PROTO = 33, 41, 44, 123, 124

_OLDEST = 0x10101000
_NAMES = ("libssl.so.3", "libssl.so.1.1")
_HINT = "install OpenSSL's library (Debian: libssl3; conda: openssl), or leave tls off"

PskClient = ctypes.CFUNCTYPE(
    ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint
)
"""(ssl, hint, identity, size of that, key, size of that) -> bytes of the key, 0: none."""
PskServer = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint)
"""(ssl, identity, key, size of that) -> bytes of the key, 0: unknown."""

_p, _s, _i, _l, _z = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_size_t
_FUNCTIONS = {
    "OpenSSL_version": (_s, _i),
    "OpenSSL_version_num": (ctypes.c_ulong,),
    "ERR_clear_error": (None,),
    "ERR_get_error": (ctypes.c_ulong,),
    "ERR_peek_error": (ctypes.c_ulong,),
    "ERR_reason_error_string": (_s, ctypes.c_ulong),
    "TLS_method": (_p,),
    "SSL_CTX_new": (_p, _p),
    "SSL_CTX_free": (None, _p),
    "SSL_CTX_ctrl": (_l, _p, _i, _l, _p),
    "SSL_CTX_set_options": (ctypes.c_uint64, _p, ctypes.c_uint64),
    "SSL_CTX_set_num_tickets": (_i, _p, _z),
    "SSL_CTX_set_ciphersuites": (_i, _p, _s),
    "SSL_CTX_set_default_read_buffer_len": (None, _p, _z),
    "SSL_CTX_set_verify": (None, _p, _i, _p),
    "SSL_CTX_use_certificate_chain_file": (_i, _p, _s),
    "SSL_CTX_use_PrivateKey_file": (_i, _p, _s, _i),
    "SSL_CTX_check_private_key": (_i, _p),
    "SSL_CTX_load_verify_locations": (_i, _p, _s, _s),
    "SSL_CTX_set_psk_client_callback": (None, _p, PskClient),
    "SSL_CTX_set_psk_server_callback": (None, _p, PskServer),
    "SSL_new": (_p, _p),
    "SSL_free": (None, _p),
    "SSL_set_fd": (_i, _p, _i),
    "SSL_set_session_id_context": (_i, _p, _s, ctypes.c_uint),
    "SSL_set_connect_state": (None, _p),
    "SSL_set_accept_state": (None, _p),
    "SSL_do_handshake": (_i, _p),
    "SSL_session_reused": (_i, _p),
    "SSL_get_verify_result": (_l, _p),
    "X509_verify_cert_error_string": (_s, _l),
    "SSL_export_keying_material": (_i, _p, _p, _z, _s, _z, _p, _z, _i),
    "SSL_read": (_i, _p, _p, _i),
    "SSL_write": (_i, _p, _p, _i),
    "SSL_shutdown": (_i, _p),
    "SSL_key_update": (_i, _p, _i),
    "SSL_get_error": (_i, _p, _i),
}


@functools.cache
def library() -> ctypes.CDLL:
    """OpenSSL's library. Raises ``NotSupported`` if none is found that can be used."""
    found = None
    for name in (*_NAMES, ctypes.util.find_library("ssl")):
        try:
            found = found or ctypes.CDLL(name) if name else found
        except OSError:
            continue
    if found is None:
        raise NotSupported(f"no shared libssl here; Python has {ssl.OPENSSL_VERSION} of its own", device="tls", hint=_HINT)
    try:
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise NotSupported(f"the libssl of this host is no OpenSSL 1.1.1 or later: {error}", device="tls", hint=_HINT) from None
    if found.OpenSSL_version_num() < _OLDEST:
        raise NotSupported(f"{version(found)} has no TLS 1.3", device="tls", hint=_HINT)
    return found


def version(lib: ctypes.CDLL) -> str:
    return str(lib.OpenSSL_version(0).decode())


def address(function: object) -> int:
    """The address of a function of the library, for kernels."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def reason(code: int) -> str:
    """The text of an error's number (``ERR_get_error``); empty if it is unknown."""
    text = library().ERR_reason_error_string(code)
    return text.decode("utf-8", "replace") if text else ""
