//! HTTP: shows the state of the server to browsers, probes and Prometheus, on the same port as ggml's protocol or on its own. Read-only:
//! GET and HEAD.
//!
//! A connection that begins with a method of HTTP leaves the sessions, also if the server is full or drains, and takes a place of the
//! [`HttpPool`] for one request: a page and a scraper ask once a second, for which a new connection costs little. Nothing here waits for a lock that a session takes (`statistics`). Clients of other machines see no addresses and no
//! keys; names of models are not known here.

mod metrics;
mod pool;
mod request;
mod response;

use std::sync::Arc;
use std::time::Duration;

use super::context::ServerContext;
use super::status;
use crate::rpc::transport::{Connection, Deadline, PeerAddr, TransportError};
use pool::HttpPermit;
pub(super) use pool::{HostNames, HttpPool};
pub(super) use request::is_http;
use request::{BadRequest, MAX_HEAD, Request};
use response::Response;

/// The page: one file, which loads nothing.
const PAGE: &str = include_str!("status.html");

/// Time within which a head must arrive, and a response must be read.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Generates from one table the routes and their paths.
macro_rules! routes {
    ($($(#[$doc:meta])* $route:ident: $path:literal;)*) => {
        /// What can be requested.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Route {
            $($(#[$doc])* $route,)*
        }

        impl Route {
            const PATHS: &[&str] = &[$($path),*];

            fn of_path(path: &str) -> Option<Route> {
                match path { $($path => Some(Route::$route),)* _ => None }
            }
        }
    };
}

routes! {
    /// The status page.
    Page: "/";
    /// Whether the process serves HTTP.
    Health: "/health";
    /// Whether the server is in service: it does not drain.
    Ready: "/ready";
    /// For Prometheus.
    Metrics: "/metrics";
    /// [`ServerStatus`](crate::rpc::status::ServerStatus), as JSON.
    Status: "/api/status";
}

/// Serves the request of a connection, and closes it. `received` are its bytes that were read.
pub(super) fn serve(server: &Arc<ServerContext>, connection: Connection, received: Vec<u8>) {
    let peer = connection.peer();
    let Some(permit) = server.http.admit(peer, connection.aborter()) else {
        return log::debug!("{peer}: closed, because all connections for HTTP of its address are used");
    };
    if let Err(e) = serve_request(server, connection, received, &permit) {
        log::debug!("{peer}: HTTP ended: {e}");
    }
}

fn serve_request(
    server: &ServerContext,
    connection: Connection,
    mut received: Vec<u8>,
    permit: &HttpPermit,
) -> Result<(), TransportError> {
    let peer = connection.peer();
    let (mut receiver, mut sender) = connection.split();
    let deadline = Deadline::after(MESSAGE_TIMEOUT);
    let request = loop {
        match request::parse(&received, server.http.host_names()) {
            Ok(Some(request)) => break Ok(request),
            Err(bad) => break Err(bad),
            Ok(None) => {}
        }
        let mut bytes = [0; 1024];
        let room = bytes.len().min(MAX_HEAD.saturating_sub(received.len()).max(1));
        match receiver.read_into(bytes.get_mut(..room).unwrap_or_default(), &deadline)? {
            0 => return Ok(()),
            n => received.extend_from_slice(bytes.get(..n).unwrap_or_default()),
        }
        // A client that sends single bytes never lets the read time out.
        if deadline.remaining().is_none() {
            return Ok(());
        }
    };
    let Some((serving, wait)) = permit.begin_request() else { return Ok(()) };
    if !wait.is_zero() {
        std::thread::sleep(wait);
    }
    let (response, head_only) = match request {
        Ok(request) => (respond(server, &request, peer), request.head_only),
        Err(bad) => (Response::of_bad_request(bad), false),
    };
    // From here on a new client may take the place of this one, which may never read.
    drop(serving);
    sender.write_by(&response.encode(head_only), &Deadline::after(MESSAGE_TIMEOUT))
}

fn respond(server: &ServerContext, request: &Request, peer: PeerAddr) -> Response {
    // Probes name the server as they like: they read nothing that a foreign page could use.
    let is_probe = matches!(request.route, Some(Route::Health | Route::Ready));
    if !request.host_is_known && !is_probe {
        let text = "This server is not known by that name. Use its address, localhost, or a name of --listen, --host or --http-host.\n";
        return Response::text(421, text);
    }
    match request.route {
        Some(Route::Page) => Response::html(PAGE),
        Some(Route::Health) => Response::text(200, "ok\n"),
        Some(Route::Ready) if server.lifecycle.is_ending() => Response::text(503, "draining\n"),
        Some(Route::Ready) => Response::text(200, "ready\n"),
        Some(Route::Metrics) => Response::metrics(metrics::text(server)),
        Some(Route::Status) => Response::json(&status::of(server, peer, None)),
        None => Response::text(404, &format!("Not found. There are: {}\n", Route::PATHS.join(" "))),
    }
}
