//! Golden tests: compare the text form of the plans of all test graphs with the committed files.
//!
//! `FANOUT_BLESS=1 cargo test --lib golden` rewrites the files. Review their difference before it is committed.

use super::graphs;
use crate::sched::{Options, Plan};
use std::path::PathBuf;
use std::sync::Arc;

/// Configurations that each graph is planned for: number of devices, whether they are in one domain, and depth.
const CONFIGS: [(usize, bool, usize); 2] = [(3, true, 2), (2, false, 1)];

#[test]
fn plans_match_the_golden_files() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/sched/tests/golden");
    let bless = std::env::var("FANOUT_BLESS").is_ok_and(|value| value == "1");
    for (name, make) in graphs::ALL {
        let mut text = String::new();
        for (count, one_domain, depth) in CONFIGS {
            let domains = if one_domain { "one domain" } else { "a domain each" };
            let options = Options { depth, ..Options::default() };
            let task = Arc::new(make(count).unwrap());
            let plan = Plan::new(task, &graphs::devices(count, one_domain), &options).unwrap();
            text += &format!("# {count} devices, {domains}, depth {depth}\n{plan}");
        }
        let path = folder.join(format!("{name}.txt"));
        if bless {
            std::fs::write(&path, &text).unwrap();
        }
        let wanted = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let differs = text.lines().zip(wanted.lines()).position(|(got, wanted)| got != wanted);
        let line = differs.unwrap_or(text.lines().count().min(wanted.lines().count()));
        let at = |text: &str| text.lines().nth(line).unwrap_or("the end").to_owned();
        assert!(text == wanted, "{name}.txt, line {}: planned {:?}, was {:?}", line + 1, at(&text), at(&wanted));
    }
}
