//! COMM_INIT, COMM_ALLREDUCE and COMM_FREE of protocol 8.0: a client lets two servers add tensors without it.
//!
//! Served only between servers that the operator lists (`--peer`). Otherwise COMM_INIT is answered 0, and the client adds
//! through itself, which takes longer. llama.cpp's server would listen on every interface, or connect to any host, on any
//! client's request.

use std::collections::HashMap;
use std::net::SocketAddr;

use log::debug;

use super::error::GgmlError;
use super::session::GgmlSession;
use crate::rpc::server::collectives::{
    self, AddressClaim, COMM_PORT_OFFSET, CONNECTING_RANK, CommLink, LISTENING_RANK, LinkRequest, MAX_HOST_BYTES,
    ReduceError, Reducer, ReductionTarget, RendezvousError, RendezvousTimeouts,
};
use crate::rpc::server::log_limits::LogKind;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::tenants::Resource;
use crate::rpc::wire::{CommAllreduce, CommFree, CommInit, Response};
use crate::tensor::{DType, TensorDesc};

/// Number of ranks.
const WORLD: u32 = 2;

/// The connections to other servers of a session, by the position of the device.
#[derive(Default)]
pub(super) struct Communicators {
    by_device: HashMap<u32, Communicator>,
    /// Whether the log has a line about a COMM_INIT that was answered 0.
    warned: bool,
}

/// The connection of a device, with what its reductions need.
struct Communicator {
    link: CommLink,
    /// At rank 0, until the first COMM_ALLREDUCE.
    claim: Option<AddressClaim>,
    reducer: Reducer,
}

impl GgmlSession<'_> {
    /// COMM_INIT: connects a device to another server, and replies whether it is connected.
    pub(super) fn comm_init(&mut self, request: &CommInit) -> Result<(), SessionError> {
        let &CommInit { device, rank, world, port, .. } = request;
        if self.resources.device(device).is_err() || world != WORLD || rank >= WORLD {
            return self.reply(&Response::CommInit(false));
        }
        let connected = match u16::try_from(port) {
            Ok(port) => self.connect_device(device, &LinkRequest { rank, port, host: host_text(request) }),
            Err(_) => Err(RendezvousError::NotDialled(format!("no port has the number {port}"))),
        };
        match connected {
            Ok(()) => self.reply(&Response::CommInit(true)),
            // Ends the session: a client may have sent any number of these requests before it hung up.
            Err(RendezvousError::ClientHungUp) => Err(GgmlError::HungUpDuringCommInit.into()),
            Err(e) => {
                self.log_refused(rank, &e);
                self.reply(&Response::CommInit(false))
            }
        }
    }

    /// Connects a device, unless it has the requested connection already.
    fn connect_device(&mut self, device: u32, request: &LinkRequest) -> Result<(), RendezvousError> {
        if self.communicators.by_device.get(&device).is_some_and(|communicator| communicator.link.serves(request)) {
            return Ok(());
        }
        // Closed first: the other server must not take it for the new one.
        self.communicators.by_device.remove(&device);
        let server = self.resources.server;
        let allowlist = &server.peers;
        let timeouts = RendezvousTimeouts::new(server.config.comm_init_timeout);
        let hung_up = || self.connection.hung_up();
        let (link, claim) = if request.rank == LISTENING_RANK {
            let at = self.listen_address(request.port)?;
            let (link, claim) = server.rendezvous.accept(request, at, allowlist, timeouts, &hung_up)?;
            (link, Some(claim))
        } else {
            let permit = server.tenants.reserve(self.resources.peer, Resource::TransferThreads);
            let permit = permit.map_err(|e| RendezvousError::NotDialled(e.to_string()))?;
            (collectives::dial(request, permit, allowlist, timeouts, &hung_up)?, None)
        };
        debug!("{}: device {device} is connected to {} as rank {}", self.resources.peer, link.peer(), request.rank);
        self.communicators.by_device.insert(device, Communicator { link, claim, reducer: Reducer::default() });
        Ok(())
    }

    /// The address on which rank 0 listens: the one to which the client has connected, with the requested port.
    ///
    /// # Errors
    /// There is no list of peers, or the port is not the one that the operator or the server's own port determines.
    fn listen_address(&self, port: u16) -> Result<SocketAddr, RendezvousError> {
        let server = self.resources.server;
        if server.peers.is_empty() {
            return Err(RendezvousError::Listen(format!("port {port}: the server was started without --peer")));
        }
        let own = self.connection.local_addr();
        let own = own.ok_or_else(|| RendezvousError::Listen("a transport without IP addresses".to_owned()))?;
        let expected = server.config.comm_port.or_else(|| own.port().checked_add(COMM_PORT_OFFSET));
        if expected != Some(port) {
            return Err(RendezvousError::Listen(match expected {
                Some(expected) => format!("port {port}: expected port {expected} (--comm-port)"),
                None => format!("port {port}: no port is {COMM_PORT_OFFSET} above {} (--comm-port)", own.port()),
            }));
        }
        Ok(SocketAddr::new(own.ip().to_canonical(), port))
    }

    /// Logs why COMM_INIT is answered 0. One warning per session: a client sends one of these requests for each device.
    fn log_refused(&mut self, rank: u32, why: &RendezvousError) {
        let peer = self.resources.peer;
        if std::mem::replace(&mut self.communicators.warned, true) {
            return debug!("{peer}: COMM_INIT: {why}");
        }
        // llama.cpp's rank 0 waits for rank 1 without a limit, and its client with it.
        let remedy = match rank {
            CONNECTING_RANK => {
                "; if it hangs, allow this server to dial the other one (--peer HOST), or start the client with \
                 GGML_RPC_NO_COMM=1"
            }
            _ => "",
        };
        let text = format_args!(
            "{peer}: COMM_INIT: not connected to the other server: {why}. The client adds through itself, which takes \
             longer{remedy}"
        );
        self.resources.server.logs.log(peer, LogKind::RefusedCollective, text);
    }

    /// COMM_ALLREDUCE: adds the other server's tensor to this one's.
    pub(super) fn comm_allreduce(&mut self, request: &CommAllreduce) -> Result<(), SessionError> {
        let device = request.device;
        let target = self.resources.device(device)?;
        let communicator = self.communicators.by_device.get_mut(&device).ok_or(GgmlError::NoCommunicator(device))?;
        communicator.claim = None;
        let record = &request.tensor;
        if record.ne.contains(&0) {
            return Ok(()); // A record without elements may lie anywhere.
        }
        let tensor = self.resources.handles.locate(record)?;
        let (desc, elements) = (tensor.desc, tensor.desc.elements());
        let without_gaps = elements.checked_mul(size_of::<f32>()) == Some(desc.extent());
        if tensor.entry.device != device || desc.dtype() != DType::F32 || !without_gaps {
            return Err(GgmlError::NotReducible { name: record.name().into_owned(), device }.into());
        }
        // llama.cpp's client sends permuted tensors, too: both servers add them in the order of memory.
        let desc = if desc.is_contiguous() { desc } else { TensorDesc::contiguous(DType::F32, [elements, 1, 1, 1])? };
        let region = tensor.region(0, desc.extent() as u64)?;
        let config = &self.resources.server.config;
        let inline = !self.queues.other_devices_in_use(device);
        let hung_up = || self.connection.hung_up();
        let target = ReductionTarget {
            device: &**target,
            queue: &mut **self.queues.get(device)?,
            inline,
            budget: &self.resources.budget,
            stall_timeout: config.stall_timeout,
            reply_timeout: config.reply_timeout,
            hung_up: &hung_up,
        };
        let _host = self.resources.memory.wait(MAX_HOST_BYTES.min(2 * region.bytes()))?;
        let peer = communicator.link.peer();
        communicator.reducer.reduce(&mut communicator.link, &desc, &region, target).map_err(|e| match e {
            ReduceError::Exchange(error) => GgmlError::Exchange { peer, error }.into(),
            ReduceError::Device(e) => e.into(),
        })
    }

    /// COMM_FREE: closes a device's connection and frees its scratch memory.
    pub(super) fn comm_free(&mut self, request: &CommFree) -> Result<(), SessionError> {
        self.resources.device(request.device)?;
        self.communicators.by_device.remove(&request.device);
        Ok(())
    }
}

/// The host of rank 0, up to the first zero. What is not UTF-8 is no host name either.
fn host_text(request: &CommInit) -> String {
    let host = request.host.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(host).into_owned()
}
