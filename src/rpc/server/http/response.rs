//! Responses.

use std::fmt::Write;

use super::BadRequest;
use crate::rpc::status::ServerStatus;

/// The page may run its own script and style, and load nothing but the status.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A response.
pub(super) struct Response {
    status: u16,
    content_type: &'static str,
    body: Vec<u8>,
}

impl Response {
    pub(super) fn text(status: u16, text: &str) -> Response {
        Response { status, content_type: "text/plain; charset=utf-8", body: text.into() }
    }

    pub(super) fn html(page: &str) -> Response {
        Response { status: 200, content_type: "text/html; charset=utf-8", body: page.into() }
    }

    pub(super) fn metrics(text: String) -> Response {
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        Response { status: 200, content_type, body: text.into() }
    }

    pub(super) fn json(status: &ServerStatus) -> Response {
        match serde_json::to_vec(status) {
            Ok(body) => Response { status: 200, content_type: "application/json", body },
            Err(e) => Response::text(500, &format!("{e}\n")),
        }
    }

    pub(super) fn of_bad_request(bad: BadRequest) -> Response {
        let (status, text) = match bad {
            BadRequest::Malformed => (400, "This is no valid request of HTTP/1.\n"),
            BadRequest::NoHost => (400, "A request of HTTP/1.1 needs a Host.\n"),
            BadRequest::Body => (413, "Requests have no body here.\n"),
            BadRequest::TooLarge => (431, "The head of the request is too large.\n"),
            BadRequest::Method => (405, "Only GET and HEAD are served.\n"),
        };
        Response::text(status, text)
    }

    /// The bytes of the response.
    pub(super) fn encode(&self, head_only: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            413 => "Content Too Large",
            421 => "Misdirected Request",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let mut head = format!("HTTP/1.1 {} {reason}\r\n", self.status);
        let mut field = |name: &str, value: &str| _ = write!(head, "{name}: {value}\r\n");
        field("Content-Type", self.content_type);
        field("Content-Length", &self.body.len().to_string());
        field("Cache-Control", "no-store");
        field("X-Content-Type-Options", "nosniff");
        field(
            "Content-Security-Policy",
            if self.content_type.starts_with("text/html") { PAGE_POLICY } else { "default-src 'none'" },
        );
        if self.status == 405 {
            field("Allow", "GET, HEAD");
        }
        field("Connection", "close");
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        if !head_only {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}
