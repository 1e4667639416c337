//! The options of HTTP.

use std::net::IpAddr;
use std::str::FromStr;

use fanout::rpc::server::{Config, ListenAddress};

/// Where the state of the server is shown over HTTP.
#[derive(Debug, clap::Args)]
pub(crate) struct HttpArgs {
    /// Where the state of the server is shown over HTTP: `off`, or an address of its own; 8080=allow:10.0.0.0/24 names who may
    /// connect there. Read-only, and without addresses and keys of clients for other machines: / (a page), /health, /ready, /metrics
    /// (Prometheus), /api/status (JSON) [default: the addresses without TLS; with --key, nowhere].
    #[arg(long, value_name = "off|[HOST:]PORT")]
    http: Option<HttpOption>,

    /// Names under which clients of HTTP reach the server, beside localhost, addresses, and the names of --host and --listen. By other
    /// names it shows nothing, because a foreign web page could use one of its own.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    http_host: Vec<String>,
}

#[derive(Clone, Debug)]
enum HttpOption {
    Off,
    At(ListenAddress),
}

impl FromStr for HttpOption {
    type Err = String;

    fn from_str(text: &str) -> Result<HttpOption, String> {
        if text == "off" {
            return Ok(HttpOption::Off);
        }
        let address: ListenAddress = text.parse().map_err(|e| format!("{e}; or `off`"))?;
        if address.plain() || address.version().is_some() {
            return Err("an address for HTTP has no `plain` and no version".to_owned());
        }
        Ok(HttpOption::At(address.for_http()))
    }
}

impl HttpArgs {
    /// The address for HTTP alone.
    pub(crate) fn address(&self) -> Option<ListenAddress> {
        match &self.http {
            Some(HttpOption::At(address)) => Some(address.clone()),
            Some(HttpOption::Off) | None => None,
        }
    }

    /// The configuration with these options. `addresses` are those on which the server listens.
    pub(crate) fn apply(&self, config: Config, addresses: &[ListenAddress]) -> Config {
        let is_name = |host: &&str| host.parse::<IpAddr>().is_err() && !host.eq_ignore_ascii_case("localhost");
        let hosts = addresses.iter().map(ListenAddress::host).filter(is_name).map(str::to_owned);
        let names = self.http_host.iter().cloned().chain(hosts).collect();
        config.with_http(self.http.is_none()).with_http_hosts(names)
    }
}
