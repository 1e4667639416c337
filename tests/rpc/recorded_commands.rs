//! Decodes the commands of a client from the bytes that a relay recorded.

use fanout::rpc::wire::ext::{ExtCommand, ExtHeader};
use fanout::rpc::wire::{REQUEST_HEADER, RequestHeader, RpcCommand};
use fanout_testing::protocol_relay::ProtocolRelay;

pub(crate) trait RecordedCommands {
    /// The names of the commands that the client has sent after HELLO, in order. Omits an incomplete last command.
    fn commands(&self) -> Vec<&'static str>;

    /// How often the client has sent a command of the extended protocol.
    fn count(&self, command: ExtCommand) -> usize {
        self.commands().iter().filter(|&&name| name == command.name()).count()
    }
}

impl RecordedCommands for ProtocolRelay {
    fn commands(&self) -> Vec<&'static str> {
        let sent = self.sent();
        let mut rest = &sent[..];
        let mut names = Vec::new();
        while let Some((header, body)) = rest.split_first_chunk::<REQUEST_HEADER>() {
            let (name, size) = if ExtHeader::is_extension(header) {
                let header = ExtHeader::decode(header).expect("a header");
                (header.command.name(), header.size)
            } else {
                let header = RequestHeader::decode(header).expect("a header");
                (header.command.name(), header.size)
            };
            let Some(next) = body.get(size as usize..) else { break };
            names.push(name);
            rest = next;
        }
        assert!(names.first().is_none_or(|&first| first == RpcCommand::Hello.name()), "{names:?}");
        names.into_iter().skip(1).collect()
    }
}
