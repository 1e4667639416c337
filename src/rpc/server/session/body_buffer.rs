//! Reused buffer for request bodies: a session allocates it once and reads every body into it.

/// Largest capacity that is retained, in bytes. The memory of a single large graph must not be held for the rest of the
/// session.
const MAX_RETAINED_BYTES: usize = 4 << 20;

/// Frees a buffer of a capacity above [`MAX_RETAINED_BYTES`].
pub(in crate::rpc::server) fn trim(body: &mut Vec<u8>) {
    if body.capacity() > MAX_RETAINED_BYTES {
        *body = Vec::new();
    }
}
