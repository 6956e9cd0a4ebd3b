"""TLS 1.3 for the streams that leave a host: the whole of ``tcp``, and the stream beside a queue pair of ``verbs``.

Both ends prove themselves in the handshake, in one of two ways: by the job secret (a pre-shared key that is derived from it,
with an ephemeral key exchange), or by certificates of one authority, which each end has and checks. Then the ends authenticate
as they do without TLS (``peers/auth``), bound to this very stream: so whom else the authority has signed for is in between
nowhere.

There is no way down: an end that has TLS on speaks TLS 1.3 or nothing. No tickets, no resumption, no renegotiation.

The payload that RDMA carries is not encrypted by any of this: adapters move it, past the processor. So a device for ``verbs``
is refused when TLS is on, unless ``TlsOptions.rdma_in_clear`` says that this is known.
"""
