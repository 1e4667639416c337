//! A session after GREET, as `docs/protocol.md` says: many queues, answers as work is done, failures that are told.
//!
//! The session's thread reads messages and submits their work; what has to wait for a device is left to a thread of its queue
//! (`answers`). As for any user of a [`Queue`], submitting waits for room among the queue's earlier work, and a large WRITE for
//! all of that; then the client is told that we live (`pulse`).

mod answers;
mod copies;
mod describe;
mod graphs;
mod load;
mod pulse;
mod queues;
mod transfers;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::allowance::Allowance;
use super::connection::{Broken, Connection};
use super::holdings::Holdings;
use super::outgoing::Outgoing;
use super::peers::Pool;
use super::session::{End, Failure, KEPT_BODY, RUN_PATIENCE};
use super::tickets::Book;

use super::{Refusal, Shared, bounce, compile};
use crate::device::{DeviceError, Queue};
use crate::graph::validate::GraphError;
use crate::rpc::wire::ext::{
    Answer, ExtCommand, ExtHeader, ExtRequest, Fault, KeepGraph, Notice, OpenQueue, REVISION, RunGraph, State, Support,
    Wait,
};
use crate::rpc::wire::{Command, REQUEST_HEADER, Request, RequestHeader, Response, ResponseHeader, graph_cost};
use answers::Answers;
use graphs::{Graphs, Kept};
use load::Loads;
use pulse::Pulse;
use queues::{Moment, Queues};

/// Bytes that a session's client may have asked for and not got, in the largest messages. The session reads on when there are
/// fewer: they are memory of the host, which no account pays for.
const MESSAGES_DUE: u64 = 4;

struct Greeted<'a> {
    /// First to go: threads wait for their work.
    queues: Queues,
    /// Queues of the session's own that read for others, by device.
    relays: HashMap<u32, Box<dyn Queue>>,
    graphs: Graphs,
    book: Book,
    pool: Pool,
    allowance: Arc<Allowance>,
    loads: Loads,
    pulse: Pulse,
    connection: Connection,
    out: Arc<Outgoing>,
    holdings: Holdings<'a>,
}

/// A command and what is wrong with its message.
type Wrong = (Option<&'static str>, Refusal);

/// Serves a connection whose next message has the header of a GREET, to its end.
pub(super) fn run(
    shared: &Arc<Shared>,
    connection: Connection,
    holdings: Holdings<'_>,
    header: [u8; REQUEST_HEADER],
    mut body: Vec<u8>,
) -> Result<End, Failure> {
    let out = Arc::clone(connection.out());
    let allowance = Allowance::new(holdings.shared.config.limits.max_body.saturating_mul(MESSAGES_DUE));
    let book = holdings.shared.tickets.book(&holdings.account);
    let pulse = Pulse::start(shared, &out, book.arrivals());
    let mut greeted = Greeted {
        queues: Queues::default(),
        relays: HashMap::new(),
        graphs: Graphs::default(),
        book,
        pool: Pool::new(&holdings.shared.peers, &holdings.shared.config),
        allowance,
        loads: Loads::default(),
        pulse,
        connection,
        out: Arc::clone(&out),
        holdings,
    };
    greeted.greet(&header, &mut body).map_err(|e| Failure::new(Some(ExtCommand::Greet.name()), e))?;
    let served = greeted.serve(&mut body);
    greeted.loads.tell(greeted.holdings.peer);
    drop(greeted);
    // The socket's end as the session saw it may be another thread's doing.
    match (out.given_up(), served) {
        (Some((command, broken)), _) => Err(Failure::new(Some(command), broken).told(out)),
        (None, Err((command, refusal))) => Err(Failure::new(command, refusal).told(out)),
        (None, Ok(())) => {
            out.close();
            Ok(End::Closed)
        }
    }
}

impl Greeted<'_> {
    fn greet(&mut self, header: &[u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), Refusal> {
        let limits = &self.holdings.shared.config.limits;
        let header = ExtHeader::decode(header)?;
        let message = self.connection.body(header.body_len(limits)?, body)?;
        let ExtRequest::Greet(greet) = ExtRequest::decode(header.command, message, limits)? else {
            return Err(confused());
        };
        if greet.revision != u32::from(REVISION) {
            return Err(Refusal::Revision(greet.revision));
        }
        let mut reply = Vec::new();
        Answer::Greet(describe::server(self.holdings.shared)).encode(&mut reply);
        let header = ResponseHeader { size: reply.len() as u64 };
        self.out.send(|out| out.extend_from_slice(&header.encode()), &[reply])?;
        match self.holdings.shared.guests.tell(&self.out) {
            State::Ready => Ok(()),
            state => Ok(self.out.notice(&Notice::State(state))?),
        }
    }

    fn serve(&mut self, body: &mut Vec<u8>) -> Result<(), Wrong> {
        while let Some(header) = self.connection.header().map_err(|e| (None, e.into()))? {
            self.pulse.step();
            if ExtHeader::is_one(&header) {
                self.extension(header, body)?;
            } else {
                self.command(header, body)?;
            }
            self.pulse.step();
            if body.capacity() > KEPT_BODY {
                *body = Vec::new();
            }
        }
        Ok(())
    }

    /// One of the commands of 7.0 that are still of use.
    fn command(&mut self, header: [u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), Wrong> {
        let header = RequestHeader::decode(&header).map_err(|e| (None, e.into()))?;
        self.obey(header, body).map_err(|e| (Some(header.command.name()), e))
    }

    fn obey(&mut self, header: RequestHeader, body: &mut Vec<u8>) -> Result<(), Refusal> {
        let served = matches!(
            header.command,
            Command::AllocBuffer
                | Command::BufferGetBase
                | Command::FreeBuffer
                | Command::GetDeviceMemory
                | Command::GetAllocSize
        );
        if !served {
            return Err(Refusal::Superseded);
        }
        let limits = &self.holdings.shared.config.limits;
        let message = self.connection.body(header.body_len(limits)?, body)?;
        let response = match Request::decode(header.command, message, limits)? {
            Request::AllocBuffer(request) => self.holdings.alloc_buffer(&request)?,
            Request::BufferGetBase(request) => self.holdings.buffer_base(request.remote_ptr)?,
            Request::GetDeviceMemory(request) => self.holdings.device_memory(request.device)?,
            Request::GetAllocSize(request) => self.holdings.alloc_size(&request)?,
            Request::FreeBuffer(request) => {
                self.holdings.handles.remove(request.remote_ptr)?;
                self.graphs.forget(request.remote_ptr);
                return Ok(());
            }
            _ => return Err(confused()),
        };
        Ok(self.respond(&response)?)
    }

    fn extension(&mut self, header: [u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<(), Wrong> {
        let header = ExtHeader::decode(&header).map_err(|e| (None, e.into()))?;
        self.obey_extension(header, body).map_err(|e| (Some(header.command.name()), e))
    }

    fn obey_extension(&mut self, header: ExtHeader, body: &mut Vec<u8>) -> Result<(), Refusal> {
        let limits = &self.holdings.shared.config.limits;
        let len = header.body_len(limits)?;
        if header.command == ExtCommand::Write {
            return self.write(len);
        }
        let message = self.connection.body(len, body)?;
        match ExtRequest::decode(header.command, message, limits)? {
            ExtRequest::Greet(_) => Err(Refusal::GreetSecond),
            ExtRequest::OpenQueue(request) => self.open(&request),
            ExtRequest::CloseQueue(request) => self.queues.close(request.queue),
            ExtRequest::KeepGraph(request) => self.keep(&request, len),
            ExtRequest::RunGraph(request) => self.run_graph(&request),
            ExtRequest::Read(request) => self.read(&request),
            ExtRequest::Fill(request) => self.fill(&request),
            ExtRequest::Copy(request) => self.copy(&request),
            ExtRequest::Mark(request) => self.queues.mark(request.queue, request.number),
            ExtRequest::Wait(request) => self.wait(&request),
            ExtRequest::Ask(request) => {
                let open = self.queues.get(request.queue)?;
                let moment = open.moment(request.number)?;
                match moment {
                    _ if open.answers.failed() => Ok(()),
                    Moment::Reached => Ok(open.answers.reached(request.number, None)?),
                    Moment::At(point) => Ok(open.answers.reached(request.number, Some(point))?),
                    Moment::Never => Ok(()),
                }
            }
            ExtRequest::Support(Support { graph }) => {
                let device = self.holdings.device(graph.device())?;
                Ok(self.answer(&Answer::Support(describe::support(&graph, &**device)))?)
            }
            ExtRequest::Ping(_) => {
                let shared = self.holdings.shared;
                Ok(self.answer(&Answer::Ping(shared.state(), shared.sessions()))?)
            }
            ExtRequest::Load(request) => self.load(&request),
            ExtRequest::Tickets(request) => self.tickets(&request),
            ExtRequest::Receive(request) => self.receive(&request),
            ExtRequest::Send(request) => self.send(&request),
            ExtRequest::Reach(request) => self.reach(&request),
            ExtRequest::Put(request) => self.put(&request),
            ExtRequest::WriteHead(_) => Err(confused()),
        }
    }

    /// Answers a command of 7.0.
    fn respond(&self, response: &Response<'_>) -> Result<(), Broken> {
        let mut framed = Vec::new();
        response.encode(&mut framed);
        self.out.notice(&Notice::Reply(framed.get(size_of::<u64>()..).unwrap_or_default()))
    }

    /// Answers a command of the extensions.
    fn answer(&self, answer: &Answer<'_>) -> Result<(), Broken> {
        let mut body = Vec::new();
        answer.encode(&mut body);
        self.out.notice(&Notice::Reply(&body))
    }

    fn open(&mut self, request: &OpenQueue) -> Result<(), Refusal> {
        let &OpenQueue { queue: number, device } = request;
        let on = self.holdings.device(device)?;
        self.queues.admit(number)?;
        let answers = Answers::new(number, &self.out, self.holdings.shared.config.device_timeout);
        Ok(self.queues.insert(number, device, on.queue(&self.holdings.account), answers)?)
    }

    fn keep(&mut self, request: &KeepGraph<'_>, len: usize) -> Result<(), Refusal> {
        let graph = &request.graph;
        let device = self.holdings.device(graph.device())?;
        let cost = graph_cost((len - size_of_val(&request.id)) as u64, graph); // the decoder has read the number
        if self.graphs.make_room(request.id, cost)? {
            self.settle()?;
        }
        let made = match compile::compile(graph, &self.holdings.handles, graph.device(), &**device) {
            Ok(made) => Ok(made),
            Err(Refusal::Failed(e)) => Err(Fault::from(&e)),
            Err(Refusal::Graph(e @ GraphError::UnsupportedOp(_))) => Err(describe::fault(&e)),
            Err(refusal) => return Err(refusal),
        };
        let mut buffers: Vec<u64> = graph.tensors().iter().map(|record| record.buffer).filter(|&b| b != 0).collect();
        buffers.sort_unstable();
        buffers.dedup();
        self.graphs.keep(Kept { id: request.id, device: graph.device(), cost, buffers: buffers.into(), made });
        Ok(())
    }

    /// Waits until nothing is left in the queues of what was submitted so far.
    fn settle(&mut self) -> Result<(), Broken> {
        let until = Instant::now() + self.holdings.shared.config.device_timeout;
        for open in self.queues.iter() {
            open.settle(until)?;
        }
        self.graphs.settle();
        Ok(())
    }

    /// Runs a graph on this thread while it is short and no other queue waits for our next message; else it is handed over.
    fn run_graph(&mut self, request: &RunGraph) -> Result<(), Refusal> {
        let alone = self.queues.alone();
        let open = self.queues.get(request.queue)?;
        let kept = self.graphs.find(request.graph)?;
        if kept.device != open.device {
            let (graph, made_for) = (request.graph, kept.device);
            return Err(Refusal::GraphDevice { queue: request.queue, device: open.device, graph, made_for });
        }
        match &kept.made {
            Ok((program, bindings)) if alone => {
                open.submit(|queue| queue.run_inline_or_submit(program, bindings, RUN_PATIENCE))?;
            }
            Ok((program, bindings)) => _ = open.submit(|queue| queue.run(program, bindings))?,
            Err(_) if open.answers.failed() => {}
            Err(fault) => open.answers.fail(fault.clone())?,
        }
        Ok(())
    }

    fn wait(&mut self, request: &Wait) -> Result<(), Refusal> {
        let moment = self.queues.get(request.of)?.moment(request.number)?;
        let open = self.queues.get(request.queue)?;
        match moment {
            _ if open.answers.failed() || request.of == request.queue => Ok(()),
            Moment::Reached => Ok(()),
            Moment::At(point) => Ok(open.submit(|queue| queue.wait(&point)).map(drop)?),
            Moment::Never => {
                let why = format!("queue {}, whose mark {} it waits for, has failed", request.of, request.number);
                Ok(open.answers.fail(Fault::new(why))?)
            }
        }
    }
}

fn confused() -> Refusal {
    DeviceError::Bug("the decoder took one command for another".to_owned()).into()
}
