use super::*;

#[test]
fn devices_with_the_same_name_are_distinguished() {
    let gate = Gate::new(1);
    let devices = [gate.device("G").shared(), gate.device("G").shared()];
    let far = gate.device("G").with_info(|info| info.domain = Domain::unique("far")).shared();
    let budget = MemoryBudget::new(1 << 20);
    let buffers = [&devices[0], &devices[1], &far].map(|device| device.alloc(64, &budget).unwrap());
    let [here, near, far] = buffers.each_ref().map(Buffer::whole);
    let mut queue = devices[0].queue(&budget).unwrap();
    assert_eq!(queue.copy_from(near, here.clone(), None), Ok(CopyOutcome::Submitted));
    assert_eq!(queue.copy_from(far, here, None), Ok(CopyOutcome::Unreachable));
}
