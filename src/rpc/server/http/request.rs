//! The head of an HTTP request: from bytes to a typed request. Only what the status pages need is accepted.

use super::Route;
use super::pool::HostNames;
use crate::rpc::wire::REQUEST_HEADER;

/// Limit of a head in bytes.
pub(super) const MAX_HEAD: usize = 8 << 10;

/// Limit of the fields of a head.
const MAX_FIELDS: usize = 64;

/// The methods of HTTP, as far as they can begin a request.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"];

/// Whether the first bytes of a connection begin an HTTP request. No request of ggml's protocol has a command with the number of an
/// upper-case letter.
pub(in crate::rpc::server) fn is_http(first: &[u8; REQUEST_HEADER]) -> bool {
    METHODS.iter().any(|method| {
        let method = method.as_bytes();
        first.strip_prefix(method).is_some_and(|rest| rest.first() == Some(&b' '))
    })
}

/// A request that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) route: Option<Route>,
    /// Whether only the head of the response is wanted.
    pub(super) head_only: bool,
    /// Whether `Host` is a name for this server: see [`HostNames`].
    pub(super) host_is_known: bool,
}

/// Why a request is not served. The connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadRequest {
    /// It is no valid HTTP/1.
    Malformed,
    /// The head has too many bytes or fields.
    TooLarge,
    /// A method other than GET and HEAD.
    Method,
    /// HTTP/1.1 without `Host`.
    NoHost,
    /// A body, which no request here has.
    Body,
}

/// The request at the beginning of `bytes`. `None`: more bytes are needed.
///
/// # Errors
/// [`BadRequest`].
pub(super) fn parse(bytes: &[u8], names: &HostNames) -> Result<Option<Request>, BadRequest> {
    // Only so many bytes are parsed, however many have arrived: a longer head is then incomplete, and the reply does not depend on
    // how its bytes were received.
    let bytes = bytes.get(..MAX_HEAD).unwrap_or(bytes);
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() == MAX_HEAD => return Err(BadRequest::TooLarge),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(BadRequest::TooLarge),
        Err(_) => return Err(BadRequest::Malformed),
    }
    let head_only = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(BadRequest::Method),
    };
    let values = |name: &'static str| {
        request.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
    };
    let has_body = values("content-length").any(|value| value != b"0") || values("transfer-encoding").next().is_some();
    if has_body {
        return Err(BadRequest::Body);
    }
    let is_1_1 = request.version == Some(1);
    let mut hosts = values("host");
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => Some(std::str::from_utf8(host).map_err(|_| BadRequest::Malformed)?),
        (None, _) if is_1_1 => return Err(BadRequest::NoHost),
        (None, _) => None,
        (Some(_), Some(_)) => return Err(BadRequest::Malformed),
    };
    let path = request.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Ok(Some(Request {
        route: Route::of_path(path),
        head_only,
        host_is_known: host.is_none_or(|host| names.is_known(host)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> HostNames {
        HostNames::new(["gpu-2".to_owned()])
    }

    #[test]
    fn only_a_method_begins_an_http_request() {
        for (first, want) in [
            ("GET / HTT", true),
            ("HEAD / HT", true),
            ("OPTIONS *", true),
            ("CONNECT a", true),
            ("GETS / HT", false),
            ("get / HTT", false),
            ("\x0e\x03\0\0\0\0\0\0\0", false),
            ("PRI * HTT", false),
        ] {
            assert_eq!(is_http(first.as_bytes().try_into().unwrap()), want, "{first}");
        }
    }

    #[test]
    fn requests() {
        let request = |route, head_only, host_is_known| Ok(Some(Request { route, head_only, host_is_known }));
        for (text, want) in [
            ("GET / HTTP/1.1\r\nHost: 10.0.0.5:50052\r\n\r\n", request(Some(Route::Page), false, true)),
            ("GET /?x=1 HTTP/1.1\r\nHost: [::1]:50052\r\n\r\n", request(Some(Route::Page), false, true)),
            (
                "HEAD /metrics HTTP/1.1\r\nhost: LOCALHOST\r\nConnection: close\r\n\r\n",
                request(Some(Route::Metrics), true, true),
            ),
            ("GET /health HTTP/1.1\r\nHost: GPU-2:1\r\n\r\n", request(Some(Route::Health), false, true)),
            ("GET /ready HTTP/1.1\r\nHost: evil.example\r\n\r\n", request(Some(Route::Ready), false, false)),
            ("GET /api/status HTTP/1.1\r\nHost: [::1\r\n\r\n", request(Some(Route::Status), false, false)),
            ("GET /x HTTP/1.0\r\n\r\n", request(None, false, true)),
            ("GET / HTTP/1.1\r\nHost: 10.0.0.5\r\n", Ok(None)),
            ("G", Ok(None)),
            ("GET / HTTP/1.1\r\n\r\n", Err(BadRequest::NoHost)),
            ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", Err(BadRequest::Malformed)),
            ("POST / HTTP/1.1\r\nHost: 10.0.0.5\r\n\r\n", Err(BadRequest::Method)),
            ("GET / HTTP/1.1\r\nHost: 10.0.0.5\r\nContent-Length: 5\r\n\r\nhello", Err(BadRequest::Body)),
            ("GET / HTTP/1.1\r\nHost: 10.0.0.5\r\nTransfer-Encoding: chunked\r\n\r\n", Err(BadRequest::Body)),
            ("GET / HTTP/2.0\r\n\r\n", Err(BadRequest::Malformed)),
            ("GET /\0 HTTP/1.1\r\n\r\n", Err(BadRequest::Malformed)),
        ] {
            assert_eq!(parse(text.as_bytes(), &names()), want, "{text:?}");
        }
    }

    /// A head of exactly the limit is served, and no longer one, whether it arrives at once or with a request after it.
    #[test]
    fn a_head_that_is_too_large_is_refused() {
        let head_of = |len: usize| {
            let (start, end) = ("GET / HTTP/1.1\r\nHost: localhost\r\nX: ", "\r\n\r\n");
            format!("{start}{}{end}", "x".repeat(len - start.len() - end.len()))
        };
        for (len, behind) in [(MAX_HEAD, ""), (MAX_HEAD, "GET"), (MAX_HEAD + 1, ""), (9000, ""), (9000, "GET")] {
            let got = parse((head_of(len) + behind).as_bytes(), &names()).map(|found| found.is_some());
            let want = if len <= MAX_HEAD { Ok(true) } else { Err(BadRequest::TooLarge) };
            assert_eq!(got, want, "{len} {behind}");
        }
        let field = |n: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(n));
        assert_eq!(parse(field(MAX_HEAD).as_bytes(), &names()), Err(BadRequest::TooLarge));
        assert_eq!(parse(field(10).as_bytes(), &names()), Ok(None));
        let fields = format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(MAX_FIELDS + 1));
        assert_eq!(parse(fields.as_bytes(), &names()), Err(BadRequest::TooLarge));
    }
}
