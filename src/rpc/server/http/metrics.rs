//! `/metrics`: the statistics in the text format of OpenMetrics, for Prometheus.

use std::fmt;
use std::sync::atomic::Ordering;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::rpc::server::audit::Activity;
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::counters::{DataSource, EndReason, RequestHistogram};
use crate::rpc::server::tenants::Resource;

/// All metrics.
pub(super) fn text(server: &ServerContext) -> String {
    let mut registry = Registry::with_prefix("fanout");
    registry.register_collector(Box::new(Snapshot::of(server)));
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

/// A value with its labels.
#[derive(Debug)]
struct Sample {
    labels: Vec<(&'static str, String)>,
    value: f64,
}

/// A metric with all its samples.
#[derive(Debug)]
struct Metric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    is_counter: bool,
    samples: Vec<Sample>,
}

impl Metric {
    fn counter(name: &'static str, help: &'static str) -> Metric {
        Metric { name, help, unit: None, is_counter: true, samples: Vec::new() }
    }

    fn gauge(name: &'static str, help: &'static str) -> Metric {
        Metric { is_counter: false, ..Metric::counter(name, help) }
    }

    fn in_unit(self, unit: Unit) -> Metric {
        Metric { unit: Some(unit), ..self }
    }

    fn value(mut self, value: f64) -> Metric {
        self.samples.push(Sample { labels: Vec::new(), value });
        self
    }

    fn values(mut self, label: &'static str, values: impl IntoIterator<Item = (String, f64)>) -> Metric {
        let sample = |(name, value)| Sample { labels: vec![(label, name)], value };
        self.samples.extend(values.into_iter().map(sample));
        self
    }
}

/// The statistics at one moment.
#[derive(Debug)]
struct Snapshot {
    metrics: Vec<Metric>,
    requests: Vec<RequestHistogram>,
}

impl Snapshot {
    fn of(server: &ServerContext) -> Snapshot {
        let (statistics, facts) = (&server.statistics, server.statistics.facts());
        let counters = &statistics.counters;
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let sessions = statistics.sessions();
        let is_served = |activity| matches!(activity, Activity::Serving(_));
        let in_service = sessions.iter().filter(|audit| is_served(audit.activity().0)).count();
        let [_, newest, _] = statistics.last_minute();
        let device_name = |at: usize| {
            let name = server.all_devices.get(at).map(|device| device.info().name.clone()).unwrap_or_default();
            // A device may be listed twice.
            format!("{at}:{name}")
        };
        let devices = |of: &dyn Fn(usize) -> Option<f64>| -> Vec<_> {
            (0..server.all_devices.len()).filter_map(|at| Some((device_name(at), of(at)?))).collect()
        };
        let activity = |at: usize| newest.activity.get(at).copied().flatten();
        let memory = |at: usize| facts.device_memory.get(at).copied().flatten();
        let host = server.host_memory.status();
        let host_kinds = [("used", host.used), ("limit", host.limit), ("peak", host.peak)];
        let refusals = server.logs.counts().filter(|(kind, _)| kind.is_refusal());
        let events = server.logs.counts().filter(|(kind, _)| !kind.is_refusal());
        let by_name = |(kind, count): (crate::rpc::server::LogKind, u64)| (kind.label(), count as f64);
        let metrics = vec![
            Metric::gauge("ready", "1 unless the server drains").value(if server.lifecycle.is_ending() {
                0.0
            } else {
                1.0
            }),
            Metric::gauge("build", "Version of the server, as a label")
                .values("version", [(crate::VERSION.to_owned(), 1.0)]),
            Metric::gauge("uptime", "Time since the start")
                .in_unit(Unit::Seconds)
                .value(statistics.uptime().as_secs_f64()),
            Metric::gauge("sessions", "Sessions that run").value(sessions.len() as f64),
            Metric::counter("sessions_started", "Sessions that have begun").value(load(&counters.sessions)),
            Metric::counter("sessions_ended", "Sessions that have ended, by reason")
                .values("reason", EndReason::ALL.iter().map(|&r| (r.name().to_owned(), counters.ended(r) as f64))),
            Metric::counter("received", "Bytes from clients, with all headers")
                .in_unit(Unit::Bytes)
                .value(load(&counters.received)),
            Metric::counter("sent", "Bytes to clients, with all headers")
                .in_unit(Unit::Bytes)
                .value(load(&counters.sent)),
            Metric::counter("graphs", "Graphs that were submitted to devices").value(load(&counters.graphs)),
            Metric::counter("session_device_time", "Time in which devices worked for sessions")
                .in_unit(Unit::Seconds)
                .value(statistics.device_time().as_secs_f64()),
            Metric::counter("tensor_data", "Bytes of tensors that have arrived, by source")
                .in_unit(Unit::Bytes)
                .values("source", DataSource::ALL.iter().map(|&s| (s.name().to_owned(), counters.data(s) as f64))),
            Metric::counter("cache_lookups", "Lookups in the tensor cache").values(
                "result",
                [("hit", true), ("miss", false)]
                    .map(|(name, found)| (name.to_owned(), counters.cache_lookups(found) as f64)),
            ),
            Metric::gauge("requests_in_service", "Sessions that serve a request, which may wait for a device")
                .value(in_service as f64),
            Metric::gauge("queues", "Queues that clients of the extension have open")
                .value(server.tenants.used(Resource::Queues) as f64),
            Metric::gauge("device_queue_depth", "Queues that wait for their turn on a device")
                .values("device", devices(&|at| Some(activity(at)?.waiting as f64))),
            Metric::counter("device_busy", "Time in which a device has worked; of a GPU by samples")
                .in_unit(Unit::Seconds)
                .values("device", devices(&|at| Some(activity(at)?.busy.as_secs_f64()))),
            Metric::gauge("device_memory_free", "Memory of a device that can be allocated")
                .in_unit(Unit::Bytes)
                .values("device", devices(&|at| Some(memory(at)?.free as f64))),
            Metric::gauge("device_memory", "Memory of a device")
                .in_unit(Unit::Bytes)
                .values("device", devices(&|at| Some(memory(at)?.total as f64))),
            Metric::gauge("host_memory", "Host memory that clients use outside of devices")
                .in_unit(Unit::Bytes)
                .values("kind", host_kinds.map(|(kind, bytes)| (kind.to_owned(), bytes as f64))),
            Metric::gauge("groups", "Tensor groups of which this server has ranks").value(facts.groups as f64),
            Metric::gauge("pending_transfers", "Transfers from other servers that have not arrived")
                .value(facts.transfers as f64),
            Metric::counter("refusals", "Clients and requests that were refused, by reason")
                .values("reason", refusals.map(by_name)),
            Metric::counter("events", "Other events of the log, also of lines that were left out")
                .values("kind", events.map(by_name)),
        ];
        Snapshot { metrics, requests: counters.requests.histograms() }
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for Metric { name, help, unit, is_counter, samples } in &self.metrics {
            let kind = if *is_counter { MetricType::Counter } else { MetricType::Gauge };
            let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
            for Sample { labels, value } in samples {
                let encode = |metric: &mut MetricEncoder<'_>| match is_counter {
                    true => metric.encode_counter::<NoLabelSet, f64, f64>(value, None),
                    false => metric.encode_gauge(value),
                };
                if labels.is_empty() { encode(&mut metric)? } else { encode(&mut metric.encode_family(labels)?)? }
            }
        }
        let help = "Time of requests, from the header until the next one is read, by command";
        let mut metric = encoder.encode_descriptor("request", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for RequestHistogram { command, total, buckets } in &self.requests {
            let count = buckets.iter().map(|&(_, count)| count).sum();
            let labels = [("command", *command)];
            let mut of_command = metric.encode_family(&labels)?;
            of_command.encode_histogram::<NoLabelSet>(total.as_secs_f64(), count, buckets, None)?;
        }
        Ok(())
    }
}
