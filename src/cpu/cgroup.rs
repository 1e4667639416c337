//! Memory limits of this process's control groups, of cgroup versions 1 and 2.
//!
//! The process's group and every group above it may have a limit. A container often sees only its own group, at the root of the
//! mount, although the system reports a longer path: levels that are not visible are skipped, and the root is always read.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// The files of one version of cgroups, in the folder of a group.
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    /// Field of `memory.stat`: file pages that the system drops when memory is short, in bytes. They count as used.
    reclaimable: &'static str,
}

const V1: GroupFiles =
    GroupFiles { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", reclaimable: "total_inactive_file" };

const V2: GroupFiles = GroupFiles { limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file" };

/// The memory limit of a group, and what the group uses, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupMemory {
    pub(super) limit: u64,
    /// Without what the system drops when memory is short.
    used: u64,
}

impl GroupMemory {
    pub(super) fn available(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// The limits of this process's groups. Empty where there are none.
pub(super) fn process_limits() -> Vec<GroupMemory> {
    let table = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limits_of(&table, Path::new("/sys/fs/cgroup"))
}

/// The limits of the groups in `table`, which has the form of `/proc/self/cgroup`. `mount`: where cgroups are mounted.
fn limits_of(table: &str, mount: &Path) -> Vec<GroupMemory> {
    let mut limits = Vec::new();
    for line in table.lines() {
        // Hierarchy, controllers separated by commas, path. The line of version 2 names no controllers.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, files) = match controllers {
            "" => (mount.to_owned(), V2),
            _ if controllers.split(',').any(|controller| controller == "memory") => (mount.join("memory"), V1),
            _ => continue,
        };
        limits.extend(folders(&root, path).iter().filter_map(|folder| read_group(folder, &files)));
    }
    limits
}

/// The folders of a group and of all groups above it. A path that leads out of the mount (`/..`) counts as the root.
fn folders(root: &Path, path: &str) -> Vec<PathBuf> {
    let mut folders = vec![root.to_owned()];
    let parts: Vec<_> = Path::new(path).components().filter(|part| *part != Component::RootDir).collect();
    if parts.iter().all(|part| matches!(part, Component::Normal(_))) {
        for part in parts {
            folders.extend(folders.last().map(|parent| parent.join(part)));
        }
    }
    folders
}

/// `None` if the group has no limit or is not visible.
fn read_group(folder: &Path, files: &GroupFiles) -> Option<GroupMemory> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(files.limit)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| line.strip_prefix(files.reclaimable)?.trim().parse().ok());
    let used = number(files.usage).unwrap_or(0).saturating_sub(reclaimable.unwrap_or(0));
    Some(GroupMemory { limit, used })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;

    fn limited(limit: u64, used: u64) -> GroupMemory {
        GroupMemory { limit, used }
    }

    #[test]
    fn limits_of_all_visible_levels_are_read() {
        let mount = tempfile::tempdir().unwrap();
        let files = [
            // Version 2: the process's group has a limit, the one above has none, and a limit above that.
            ("memory.max", "9000"),
            ("memory.current", "500"),
            ("a/memory.max", "max"),
            ("a/b/memory.max", "4000\n"),
            ("a/b/memory.current", "3000\n"),
            ("a/b/memory.stat", "anon 10\ninactive_file 1000\n"),
            ("damaged/memory.max", "many"),
            // Version 1.
            ("memory/memory.limit_in_bytes", "9223372036854771712"),
            ("memory/x/memory.limit_in_bytes", "700"),
            ("memory/x/memory.usage_in_bytes", "600"),
            ("memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n"),
        ];
        for (file, text) in files {
            let path = mount.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = limited(9000, 500);
        let unlimited = limited(9_223_372_036_854_771_712, 0);
        for (table, want) in [
            ("0::/a/b\n", vec![root, limited(4000, 2000)]),
            ("0::/\n", vec![root]),
            ("0::/a\n", vec![root]),
            ("0::/docker/1234/not/visible\n", vec![root]),
            ("0::/../../a/b\n", vec![root]),
            ("0::/damaged\n", vec![root]),
            ("8:pids:/\n4:memory:/x\n", vec![unlimited, limited(700, 550)]),
            ("4:cpu,memory:/x\n1:name=memory:/x\n", vec![unlimited, limited(700, 550)]),
            ("", vec![]),
            ("0\n::\n4:memory", vec![root]),
        ] {
            assert_eq!(limits_of(table, mount.path()), want, "{table:?}");
        }
        assert_eq!((limited(700, 550).available(), limited(5, 9).available()), (150, 0));
    }
}
