//! Test vectors written by hand from the specification: encoder and decoder cannot agree on a common mistake.

use crate::rpc::wire::*;

use super::inputs::LIMITS;

fn check_request(request: &Request<'_>, frame: &[u8]) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    assert_eq!(bytes, frame);
    assert_eq!(Request::decode(request.command(), &frame[REQUEST_HEADER..], &LIMITS).as_ref(), Ok(request));
}

fn check_response(response: &Response<'_>, frame: &[u8]) {
    let mut bytes = Vec::new();
    response.encode(&mut bytes);
    assert_eq!(bytes, frame);
    assert_eq!(Response::decode(response.command(), &frame[RESPONSE_HEADER..]).as_ref(), Ok(response));
}

#[test]
fn hello() {
    let mut frame = vec![14, 24, 0, 0, 0, 0, 0, 0, 0];
    frame.extend([0; 24]);
    check_request(&Request::Hello(Hello { conn_caps: Some([0; 24]) }), &frame);
    check_request(&Request::Hello(Hello { conn_caps: None }), &[14, 0, 0, 0, 0, 0, 0, 0, 0]);

    let mut frame = vec![28, 0, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0];
    frame.extend([9; 24]);
    let reply = HelloReply { version: PROTOCOL_VERSION, conn_caps: Some([9; 24]), extension_byte: 0 };
    check_response(&Response::Hello(reply.clone()), &frame);
    frame[11] = 0x21;
    check_response(&Response::Hello(HelloReply { extension_byte: 0x21, ..reply }), &frame);

    let version = Version { major: 3, minor: 5, patch: 1 };
    let old = Response::Hello(HelloReply { version, conn_caps: None, extension_byte: 0 });
    check_response(&old, &[3, 0, 0, 0, 0, 0, 0, 0, 3, 5, 1]);
}

#[test]
fn alloc_buffer() {
    check_request(
        &Request::AllocBuffer(AllocBuffer { device: 1, size: 0x0102_0304_0506_0708 }),
        &[0, 12, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1],
    );
    check_response(
        &Response::AllocBuffer(AllocBufferReply { remote_ptr: 0x1122, remote_size: 0x0100_0000 }),
        &[16, 0, 0, 0, 0, 0, 0, 0, 0x22, 0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    );
}

#[test]
fn small_messages() {
    check_request(&Request::DeviceCount(DeviceCount {}), &[15, 0, 0, 0, 0, 0, 0, 0, 0]);
    check_response(&Response::DeviceCount(2), &[4, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
    check_request(
        &Request::BufferClear(BufferClear { remote_ptr: 5, value: 0xaa }),
        &[5, 9, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0xaa],
    );
    check_request(
        &Request::GraphRecompute(GraphRecompute { device: 3, uid: None }),
        &[16, 4, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0],
    );
    check_request(
        &Request::GraphRecompute(GraphRecompute { device: 3, uid: Some(0x102) }),
        &[16, 12, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0],
    );
    check_request(&Request::CommFree(CommFree { device: 1 }), &[22, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    check_response(&Response::CommInit(false), &[1, 0, 0, 0, 0, 0, 0, 0, 0]);
    check_response(&Response::GetTensor2d(&[9]), &[1, 0, 0, 0, 0, 0, 0, 0, 9]);
    check_response(&Response::SetTensorHash(true), &[1, 0, 0, 0, 0, 0, 0, 0, 1]);
    check_response(&Response::GetTensor(&[7, 8]), &[2, 0, 0, 0, 0, 0, 0, 0, 7, 8]);
}

/// Offset and bytes in hexadecimal; all other bytes are 0. Offsets are the running sums of the field lengths in the
/// specification.
const RECORD: [(usize, &str); 14] = [
    (0, "efcdab8967452301"),                                   // id
    (8, "0c000000"),                                           // type
    (12, "0102030405060708"),                                  // buffer
    (20, "01000000020000000300000004000000"),                  // ne
    (36, "04000000100000002000000000000080"),                  // nb
    (52, "1d000000"),                                          // op
    (56, "0000803fffffffff"),                                  // op_params[0..2]
    (116, "09000000"),                                         // op_params[15]
    (120, "12000000"),                                         // flags
    (124, "1100000000000000"),                                 // src[0]
    (196, "2200000000000000"),                                 // src[9]
    (204, "330000000000000000010000000000000000adde00000000"), // view_src, view_offs, data
    (228, "6b71"),                                             // name
    (292, "03000000"),                                         // use_count
];

#[test]
fn tensor_record() {
    let mut bytes = [0; 296];
    for (offset, hex) in RECORD {
        for (i, pair) in hex.as_bytes().as_chunks::<2>().0.iter().enumerate() {
            bytes[offset + i] = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        }
    }
    let mut op_params = [0; 16];
    (op_params[0], op_params[1], op_params[15]) = (f32::to_bits(1.0) as i32, -1, 9);
    let mut src = [0; 10];
    (src[0], src[9]) = (0x11, 0x22);
    let mut name = [0; 64];
    (name[0], name[1]) = (b'k', b'q');
    let record = TensorRecord {
        id: 0x0123_4567_89ab_cdef,
        dtype: 12,
        buffer: 0x0807_0605_0403_0201,
        ne: [1, 2, 3, 4],
        nb: [4, 16, 32, 1 << 31],
        op: 29,
        op_params,
        flags: TensorRecord::FLAG_OUTPUT | TensorRecord::FLAG_COMPUTE,
        src,
        view_src: 0x33,
        view_offs: 256,
        data: 0xdead_0000,
        name,
        use_count: 3,
    };
    assert_eq!(TensorRecord::decode(&bytes), record);
    assert_eq!(record.encode(), bytes);
    assert_eq!(record.name(), "kq");
}

#[test]
fn names_may_lack_a_nul_or_be_invalid_utf_8() {
    let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
    assert_eq!(record.name(), "");
    record.name = [b'x'; MAX_NAME];
    assert_eq!(record.name(), "x".repeat(64), "a name without NUL");
    record.name[1] = 0xff;
    record.name[2] = 0;
    assert_eq!(record.name(), "x\u{fffd}");
}

#[test]
fn integers_are_little_endian() {
    let bytes = [0xfe, 0xff, 0xff, 0xff, 1, 0, 0, 0x80];
    assert_eq!(Reader::new(&bytes).u8("u8"), Ok(0xfe));
    assert_eq!(Reader::new(&bytes).u32("u32"), Ok(0xffff_fffe));
    assert_eq!(Reader::new(&bytes).i32("i32"), Ok(-2));
    assert_eq!(Reader::new(&bytes).u64("u64"), Ok(0x8000_0001_ffff_fffe));
}
