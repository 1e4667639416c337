//! The library in a process without ggml.

#[test]
fn a_process_without_ggml_gets_no_registry() {
    assert_eq!(ggml_fanout::ggml_backend_score(), 0);
    assert!(ggml_fanout::ggml_backend_init().is_null());
}
