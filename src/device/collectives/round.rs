//! The state of a group: its ranks, and the rounds that are not complete.

use super::CollectivePart;
use crate::device::DeviceError;
use crate::ops::collective::CollectiveKind;
use crate::sync::{self, Instant};

pub(super) struct GroupState {
    pub(super) ranks: Vec<RankState>,
    /// The incomplete rounds: even and odd.
    pub(super) rounds: [RoundState; 2],
    /// Parts that were counted, and are being sent to other processes.
    pub(super) sending: usize,
    /// Whether a rank waits for the first incomplete round.
    pub(super) awaited: bool,
    /// When the last awaited round became complete.
    pub(super) completed_at: Option<Instant>,
    pub(super) failure: Option<DeviceError>,
}

pub(super) struct RankState {
    /// Name of the rank's device, or address of its server.
    pub(super) device: String,
    /// Rounds in which the rank has published.
    pub(super) published: u64,
    /// Whether the rank is in another process.
    pub(super) is_remote: bool,
}

/// The ranks that have published in a round.
#[derive(Default)]
pub(super) struct RoundState {
    pub(super) arrived: usize,
    /// The first of them, and its part.
    pub(super) first: Option<(usize, CollectivePart)>,
    /// When the first of them published, in a group with ranks in other processes.
    pub(super) since: Option<Instant>,
    /// Sum of the extents of their parts.
    pub(super) extents: usize,
}

impl Default for RankState {
    fn default() -> RankState {
        RankState { device: "no device yet".to_owned(), published: 0, is_remote: false }
    }
}

impl GroupState {
    /// Adds a rank's part to its round.
    pub(super) fn add(
        &mut self,
        rank: usize,
        number: u64,
        part: &CollectivePart,
        has_deadline: bool,
    ) -> Result<(), DeviceError> {
        let ranks = self.ranks.len();
        let [even, odd] = &mut self.rounds;
        let round = if number.is_multiple_of(2) { even } else { odd };
        let &mut (first, first_part) = round.first.get_or_insert((rank, *part));
        if !first_part.belongs_to(part) {
            let (a, b) = (self.rank_text(first), self.rank_text(rank));
            return Err(DeviceError::RanksDisagree(format!("{a} runs {first_part}, {b} runs {part}")));
        }
        if let Some(reason) = part.piece_error(rank, ranks) {
            return Err(DeviceError::RanksDisagree(reason));
        }
        round.arrived += 1;
        if round.since.is_none() && has_deadline {
            round.since = Some(sync::now());
        }
        round.extents = round.extents.saturating_add(part.extent);
        if let CollectiveKind::AllGather { axis } = part.kind
            && round.arrived == ranks
        {
            let (got, want) = (round.extents, part.ne.get(usize::from(axis)).copied().unwrap_or(0));
            if got != want {
                let reason = format!("{part}: the parts have {got} elements along the axis together, not {want}");
                return Err(DeviceError::RanksDisagree(reason));
            }
        }
        if let Some(state) = self.ranks.get_mut(rank) {
            state.published = number + 1;
        }
        Ok(())
    }

    /// Whether all ranks have published in round `number`, whose state is then reset.
    pub(super) fn take_if_complete(&mut self, number: u64) -> bool {
        let ranks = self.ranks.len();
        let [even, odd] = &mut self.rounds;
        let round = if number.is_multiple_of(2) { even } else { odd };
        let is_complete = round.arrived == ranks;
        if is_complete {
            *round = RoundState::default();
        }
        is_complete
    }

    pub(super) fn device(&self, rank: usize) -> String {
        self.ranks.get(rank).map(|rank| rank.device.clone()).unwrap_or_default()
    }

    pub(super) fn rank_text(&self, rank: usize) -> String {
        format!("rank {rank} ({})", self.device(rank))
    }
}
