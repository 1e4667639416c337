//! Clients that are built with `GGML_MAX_NAME` of 128, as stable-diffusion.cpp is, whose tensor records have 360 bytes.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use fanout::tensor::DType;

/// Length of the header of a request.
const HEADER: usize = 9;

/// The message of a client with long names: `records` records from `at` on in its body have 64 bytes more in the name.
fn lengthen(message: &[u8], at: usize, records: usize) -> Vec<u8> {
    let (header, body) = message.split_at(HEADER);
    let (start, rest) = body.split_at(at);
    let (usual, end) = rest.split_at(records * TENSOR_RECORD);
    let mut long = start.to_vec();
    for record in usual.chunks_exact(TENSOR_RECORD) {
        let (fields, use_count) = record.split_at(TENSOR_RECORD - 4);
        long.extend([fields, &[b'n'; 64], use_count].concat());
    }
    long.extend_from_slice(end);
    [&header[..1], &(long.len() as u64).to_le_bytes(), &long].concat()
}

fn set_tensor_message(tensor: &TensorRecord, data: &[u8]) -> Vec<u8> {
    let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset: 0 };
    encode_message(&Request::SetTensor(SetTensor { head, data }))
}

/// Whatever message has the first record: an upload of a whole tensor, a graph, or one of a fixed length.
#[test]
fn clients_with_long_names_are_served() {
    for first in 0..4 {
        let server = TestServer::start(Config::default());
        let mut client = Client::connect(&server);
        let memory = client.alloc(0, 1024);
        let x = memory.tensor(1, DType::F32, [4, 1, 1, 1], 0);
        let sum = node(OpCode::Add, memory.tensor(2, DType::F32, [4, 1, 1, 1], 256), &[&x, &x]);
        let floats = |values: [f32; 4]| values.map(f32::to_le_bytes).as_flattened().to_vec();
        let alloc_size =
            Request::GetAllocSize(GetAllocSize { device: 0, tensor: x.clone(), srcs: &[zero_record().encode(); 10] });
        let graph = graph_compute_message(0, &[2], &[x.clone(), sum.clone()]);
        // Behind the device, a count, an id and another count.
        let compute = lengthen(&graph, 4 + 4 + 8 + 4, 2);
        let upload = lengthen(&set_tensor_message(&x, &floats([1.0, 2.0, 3.0, 4.0])), 0, 1);
        let clear = Request::MemsetTensor(MemsetTensor { tensor: x.clone(), offset: 0, size: 16, value: 0 });
        match first {
            0 => client.write(&upload),
            1 => client.write(&compute),
            2 => client.write(&lengthen(&encode_message(&clear), 0, 1)),
            _ => {
                client.write(&lengthen(&encode_message(&alloc_size), 4, 11));
                client.read_reply(RpcCommand::GetAllocSize);
            }
        }
        client.write(&upload);
        client.write(&compute);
        client.write(&lengthen(&encode_message(&get_tensor_request(&sum, 0, 16)), 0, 1));
        assert_eq!(client.read_reply(RpcCommand::GetTensor), floats([2.0, 4.0, 6.0, 8.0]), "{first}");
        // One client has one length.
        client.send(&get_tensor_request(&sum, 0, 16));
        client.expect_refused(&["GET_TENSOR", "expected a body of 376 bytes, the header says 312"]);
    }
}

/// An upload that has the length of the usual names, from a client whose first message had long ones: its head would be longer
/// than the message.
#[test]
fn uploads_shorter_than_their_head_are_refused() {
    for command in [RpcCommand::SetTensor, RpcCommand::SetTensor2d] {
        let server = TestServer::start(Config::default());
        let mut client = Client::connect(&server);
        let memory = client.alloc(0, 1024);
        let x = memory.tensor(1, DType::F32, [4, 1, 1, 1], 0);
        client.write(&lengthen(&set_tensor_message(&x, &[0; 16]), 0, 1));
        let body = x.encode();
        let header = [&[command as u8][..], &(body.len() as u64).to_le_bytes()].concat();
        client.write(&[&header, &body[..]].concat());
        client.expect_refused(&[command.name()]);
        let mut next = Client::connect(&server);
        assert_eq!(next.request_number(&Request::DeviceCount(DeviceCount {})), 1);
    }
}
