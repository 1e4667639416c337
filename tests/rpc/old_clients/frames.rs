//! Frames of older versions, byte by byte from their layouts. Independent of the tables of the crate, so that an error in those
//! is detected.

/// Layout and numbers of a version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Version of a listener that serves only this version.
    pub(crate) listen: &'static str,
    /// The version in the reply to HELLO; `None`: no HELLO, and no field for a device.
    pub(crate) hello: Option<[u8; 3]>,
    /// Length of a tensor record in bytes.
    pub(crate) record: usize,
    /// Numbers of the commands from GET_TENSOR on: GET_TENSOR, COPY_TENSOR, GRAPH_COMPUTE, GET_DEVICE_MEMORY.
    pub(crate) commands: [u8; 4],
    /// Whether SET_TENSOR has an empty response.
    pub(crate) set_tensor_replies: bool,
    /// Numbers of the ops SCALE and UNARY.
    pub(crate) scale: u32,
    pub(crate) unary: u32,
}

/// The protocol of late 2024: no HELLO, records of 296 bytes.
pub(crate) const GEN0: Layout = Layout {
    listen: "gen0",
    hello: None,
    record: 296,
    commands: [7, 8, 9, 10],
    set_tensor_replies: true,
    scale: 29,
    unary: 69,
};

/// The protocol of spring 2024: records without the last four bytes, and fewer ops.
pub(crate) const GEN0_FIRST: Layout = Layout { record: 292, scale: 26, unary: 63, ..GEN0 };

pub(crate) const V3_0_0: Layout = Layout {
    listen: "3.0.0",
    hello: Some([3, 0, 0]),
    record: 296,
    commands: [8, 9, 10, 11],
    set_tensor_replies: false,
    scale: 31,
    unary: 80,
};

/// The second numbering of 3.0.0, of 2025-11-13, with 4 more ops.
pub(crate) const V3_0_0_SECOND: Layout = Layout { listen: "3", unary: 84, scale: 32, ..V3_0_0 };

/// The third numbering of 3.0.0, of 2025-11-25, with TOP_K, which 3.5.0 and 3.6.0 have as well.
pub(crate) const V3_0_0_THIRD: Layout = Layout { unary: 85, ..V3_0_0_SECOND };

/// Without a status in reply to graphs. Its GET_ALLOC_SIZE, which the tests do not send, is longer.
pub(crate) const V3_6_1: Layout = Layout { listen: "3.6.1", unary: 86, ..V3_0_0_SECOND };

/// A tensor of the graph that the tests send.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tensor<'a> {
    pub(crate) id: u64,
    pub(crate) buffer: u64,
    pub(crate) data: u64,
    /// A row of so many floats.
    pub(crate) floats: u32,
    pub(crate) op: u32,
    pub(crate) params: [i32; 2],
    pub(crate) srcs: &'a [u64],
    /// 16: the node is computed. Versions before 3.6 have no such flag.
    pub(crate) flags: i32,
}

impl Layout {
    /// The header of a request and its body.
    pub(crate) fn frame(&self, command: u8, parts: &[&[u8]]) -> Vec<u8> {
        let body = parts.concat();
        [&[command][..], &(body.len() as u64).to_le_bytes(), &body].concat()
    }

    /// The field for device 0, where requests have one.
    pub(crate) fn device(&self) -> &'static [u8] {
        if self.hello.is_some() { &[0; 4] } else { &[] }
    }

    /// A tensor record. Versions before 5.1 leave its last bytes undefined.
    pub(crate) fn record(&self, t: &Tensor<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        let word = |bytes: &mut Vec<u8>, n: u32| bytes.extend(n.to_le_bytes());
        bytes.extend(t.id.to_le_bytes());
        word(&mut bytes, 0); // F32
        bytes.extend(t.buffer.to_le_bytes());
        [t.floats, 1, 1, 1].iter().for_each(|&n| word(&mut bytes, n));
        [4, 4 * t.floats, 4 * t.floats, 4 * t.floats].iter().for_each(|&n| word(&mut bytes, n));
        word(&mut bytes, t.op);
        t.params.iter().for_each(|&n| word(&mut bytes, n as u32));
        bytes.extend([0; 14 * 4]);
        word(&mut bytes, t.flags as u32);
        (0..10).for_each(|at| bytes.extend(t.srcs.get(at).copied().unwrap_or(0).to_le_bytes()));
        bytes.extend([0; 16]); // view_src, view_offs
        bytes.extend(t.data.to_le_bytes());
        bytes.extend([0; 64]); // name
        assert_eq!(bytes.len(), 292);
        bytes.extend([0x5a; 4]);
        bytes.truncate(self.record);
        bytes
    }

    pub(crate) fn alloc_buffer(&self, size: u64) -> Vec<u8> {
        self.frame(0, &[self.device(), &size.to_le_bytes()])
    }

    /// GET_ALIGNMENT, GET_MAX_SIZE or GET_DEVICE_MEMORY.
    pub(crate) fn device_query(&self, command: u8) -> Vec<u8> {
        self.frame(command, &[self.device()])
    }

    /// BUFFER_GET_BASE or FREE_BUFFER.
    pub(crate) fn buffer_request(&self, command: u8, handle: u64) -> Vec<u8> {
        self.frame(command, &[&handle.to_le_bytes()])
    }

    pub(crate) fn buffer_clear(&self, handle: u64, value: u8) -> Vec<u8> {
        self.frame(5, &[&handle.to_le_bytes(), &[value]])
    }

    pub(crate) fn set_tensor(&self, t: &Tensor<'_>, offset: u64, data: &[u8]) -> Vec<u8> {
        self.frame(6, &[&self.record(t), &offset.to_le_bytes(), data])
    }

    pub(crate) fn get_tensor(&self, t: &Tensor<'_>, offset: u64, size: u64) -> Vec<u8> {
        self.frame(self.commands[0], &[&self.record(t), &offset.to_le_bytes(), &size.to_le_bytes()])
    }

    pub(crate) fn copy_tensor(&self, src: &Tensor<'_>, dst: &Tensor<'_>) -> Vec<u8> {
        self.frame(self.commands[1], &[&self.record(src), &self.record(dst)])
    }

    pub(crate) fn graph_compute(&self, nodes: &[u64], tensors: &[Tensor<'_>]) -> Vec<u8> {
        let ids: Vec<u8> = nodes.iter().flat_map(|id| id.to_le_bytes()).collect();
        let records: Vec<u8> = tensors.iter().flat_map(|t| self.record(t)).collect();
        let count = |n: usize| (n as u32).to_le_bytes();
        let parts = [self.device(), &count(nodes.len()), &ids, &count(tensors.len()), &records];
        self.frame(self.commands[2], &parts)
    }
}
