//! The tables of docs/troubleshooting.md for `rpc-server`.

use crate::gpus::emulated_program;
use crate::server_program::program;
use fanout::rpc::keys::SecretKey;
use fanout_testing::wrong_uses::{check, create_files, document, other_servers, rows};
use std::net::TcpListener;
use std::path::Path;

#[test]
fn every_message_is_that_of_the_document() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong-uses");
    create_files(&folder);
    let key = SecretKey::generate().unwrap();
    key.create_file(&folder.join("key")).unwrap();
    std::fs::write(folder.join("clients"), format!("{} client\n", key.public_key())).unwrap();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut words = other_servers();
    words.push(("BUSY_PORT", busy.local_addr().unwrap().port().to_string()));
    words.push(("SERVER_KEY", key.public_key().to_string()));
    let rows = rows(&document(), "rpc-server");
    assert!(rows.len() >= 50, "{} rows", rows.len());
    check(&rows, &folder, &words, |situation| match situation {
        "driver of CUDA 11.4" => emulated_program(&[("CUDAEMU_DRIVER_VERSION", "11.4")], &[]),
        "no visible GPU" => emulated_program(&[("CUDA_VISIBLE_DEVICES", "")], &[]),
        _ => program(&[]),
    });
}
