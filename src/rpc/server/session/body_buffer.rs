//! The buffer for request bodies, which a session keeps between requests.

/// The largest one that is kept: a single large graph is no reason to hold its memory for the rest of the session.
const MAX_KEPT: usize = 4 << 20;

/// Frees a buffer that is larger than that.
pub(in crate::rpc::server) fn trim(body: &mut Vec<u8>) {
    if body.capacity() > MAX_KEPT {
        *body = Vec::new();
    }
}
