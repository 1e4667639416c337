//! Deficit round robin: which waiting work has the next turn on a device.
//!
//! Work has two *keys*: its tenant, and one of the tenant's sessions. The tenants form a ring. Each visit of a tenant grants
//! it a [`SLICE`] of time; it is served while it has credit left, and the time that its work took is charged afterwards. Within a
//! tenant, its sessions form such a ring of their own; the work of one session is first come, first served. So between the
//! arrival of work and its turn, each other tenant has at most one slice, however many sessions it has; more only if a piece
//! of its work could not be interrupted. A flow (a tenant or a session) that used more than its credit is in debt, and is
//! passed over until its later grants have paid.
//!
//! A client that waits for each reply leaves the ring between two requests. It keeps the rest of its credit for some rounds, and
//! comes back to the front of the ring with it: otherwise a flow with many requests at a time would get a slice for each of its
//! requests, or for the part of a slice that one takes. A newcomer still waits for at most one slice of it, because the flow
//! goes to the end of the ring when that credit is used. A round ends when all waiting flows have been visited.
//!
//! A tenant that comes back in this way also *interrupts* the turn under way, whose rest keeps its credit too. Otherwise each pause
//! of a client, however short, would give the others a whole slice, and a client whose requests take half a slice would get a
//! third of the time. The rest of an interrupted turn does not interrupt in its turn.
//!
//! # Shares
//! A tenant's *share* is its weight. Its work is charged time × [`DEFAULT_SHARE`] / share, so with twice the share it has twice
//! the turns of a visit before its grant is used up. Credits and debts are such weighted times; slices and holds are real ones.
//! The slice of a tenant with a small share is the real time of its credit, or [`MIN_TURN`], after which later grants pay its
//! debt. So between the arrival of work and its turn, a tenant has at most share / [`DEFAULT_SHARE`] slices, rounded up.
//!
//! # Holds
//! A decoding client has nothing waiting while it prepares its next token. Beside a session whose commands cannot be interrupted
//! for long, rounds would then pass without time, the debt would be forgiven, and each token would wait for such a command. So a
//! tenant whose debt is more than a grant is also *held*: for as long as its debt is, it gets no turn that only such tenants wait
//! for, if another tenant has had a turn in the last [`RECENT`]. This leaves the device idle for a while, which only tenants with
//! overlong commands pay for.

use crate::sync::Instant;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Share of a tenant for which no other one is set.
pub(crate) const DEFAULT_SHARE: u32 = 100;

/// Most time of a visit with [`DEFAULT_SHARE`], and of a turn that can be interrupted.
pub(crate) const SLICE: Duration = Duration::from_millis(2);

/// Nanoseconds that a visit grants. Together with the credit that may be left it makes a [`SLICE`].
const GRANT: i64 = SLICE.as_nanos() as i64 - MIN_CREDIT;

/// Nanoseconds of credit up to which a visit ends: a change of turns for less would cost more than it gives.
const MIN_CREDIT: i64 = 125_000;

/// Largest debt, in nanoseconds: it bounds the time for which one long command excludes its session, and the visits that pay it.
/// A limit of one slice would forgive what long commands and small shares owe: a tenant with a share of 1 beside one of 100 would
/// get 6 % of the time instead of 1 %.
const MAX_DEBT: i64 = 1_000_000_000;

/// Least time of a turn before it is interrupted, so that changes of turns take a small part of the time.
pub(super) const MIN_TURN: Duration = Duration::from_micros(250);

/// How long ago a tenant had a turn that is expected to come back.
pub(crate) const RECENT: Duration = Duration::from_millis(50);

/// Rounds for which a flow without waiting work keeps its credit: some tens of milliseconds, longer than a client needs to
/// prepare its next request.
const KEPT_ROUNDS: u64 = 8;

/// Flows without waiting work that a ring keeps, beside as many as wait, before it removes those without credit and debt.
const KEPT_FLOWS: usize = 64;

/// The order of waiting items of type `T`. Each has the keys of a tenant and of a session.
pub(crate) struct FairQueue<T> {
    tenants: Ring<Ring<VecDeque<T>>>,
    len: usize,
    /// The two tenants that had the latest turns, the last one first, and when these ended.
    latest: [Option<(u64, Instant)>; 2],
    /// The time until which all waiting tenants are held.
    held_until: Option<Instant>,
    /// The tenant that had the latest turn.
    served: Option<u64>,
    /// The tenant whose turn was interrupted last, until its next turn.
    interrupted: Option<u64>,
}

/// Keys of a tenant and of a session.
pub(crate) type FlowKeys = [u64; 2];

impl<T> Default for FairQueue<T> {
    fn default() -> FairQueue<T> {
        FairQueue {
            tenants: Ring::default(),
            len: 0,
            latest: [None; 2],
            held_until: None,
            served: None,
            interrupted: None,
        }
    }
}

impl<T> FairQueue<T> {
    /// Number of waiting items.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The session that all waiting items belong to. `None`: there are none, or items of several sessions.
    pub(crate) fn only_session(&self) -> Option<u64> {
        let tenant = self.tenants.only_key()?;
        self.tenants.flows.get(&tenant)?.waiting.only_key()
    }

    /// Adds an item. `is_idle`: the device has nothing to do, so that no debt is owed to anybody. Returns whether it interrupts the
    /// turn under way: the turn should end once it has lasted for [`MIN_TURN`].
    pub(crate) fn push(&mut self, keys: FlowKeys, item: T, is_idle: bool) -> bool {
        if self.len == 0 && is_idle {
            self.tenants = Ring::default();
        }
        let joins = self.tenants.flow(keys[0]).waiting.is_empty();
        self.tenants.push(&keys, item);
        self.len += 1;
        let tenant = Some(keys[0]);
        let interrupts = joins
            && self.tenants.order.front() == Some(&tenant)
            && self.tenants.flow(keys[0]).is_visited
            && self.served != tenant
            && self.interrupted != tenant;
        if interrupts {
            self.interrupted = self.served;
        }
        interrupts
    }

    /// Removes the next item, with the time that its turn may take: at most [`SLICE`], and what is left of the credit of its
    /// tenant and its session, by the tenant's share.
    /// `None` also if all waiting tenants are [held](FairQueue::held_until) at `now`.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(T, Duration)> {
        self.held_until = self.end_of_holds(now);
        if self.held_until.is_some() {
            return None;
        }
        let (tenant, item, credit) = self.tenants.pop_next()?;
        self.len -= 1;
        self.served = Some(tenant);
        self.interrupted.take_if(|interrupted| *interrupted == tenant);
        let share = self.tenants.flow(tenant).share;
        let least = if share < DEFAULT_SHARE { MIN_TURN.as_nanos() as i64 } else { 0 };
        let time = real_time(credit, share).clamp(least, SLICE.as_nanos() as i64);
        Some((item, Duration::from_nanos(time as u64)))
    }

    /// The time until which all waiting tenants are held, by the last [`FairQueue::pop`].
    pub(crate) fn held_until(&self) -> Option<Instant> {
        self.held_until
    }

    /// Ends the holds that are over at `now`. `None` if a waiting tenant is not held; else the end of the first hold.
    fn end_of_holds(&mut self, now: Instant) -> Option<Instant> {
        let mut first_end: Option<Instant> = None;
        for key in self.tenants.order.iter().flatten() {
            let flow = self.tenants.flows.get_mut(key)?;
            let others = self.latest.iter().flatten().find(|(tenant, _)| tenant != key);
            let expected_until = others.map(|&(_, ended)| ended + RECENT);
            let end = flow.held_until.zip(expected_until).map(|(held, expected)| held.min(expected));
            let Some(end) = end.filter(|&end| end > now && real_time(flow.credit, flow.share) <= -GRANT) else {
                if flow.held_until.take_if(|held| *held <= now).is_some() {
                    flow.credit = flow.credit.max(0);
                }
                return None;
            };
            first_end = Some(first_end.map_or(end, |first| first.min(end)));
        }
        first_end
    }

    /// Charges time that work of a session has taken, until `now`, to its tenant with this share.
    pub(crate) fn charge(&mut self, keys: FlowKeys, time: Duration, share: u32, now: Instant) {
        let weighted = time.as_nanos() * u128::from(DEFAULT_SHARE) / u128::from(share.max(1));
        self.tenants.charge(&keys, i64::try_from(weighted).unwrap_or(i64::MAX));
        let tenant = keys[0];
        let flow = self.tenants.flow(tenant);
        flow.share = share;
        let debt = real_time(flow.credit, share);
        if debt < -GRANT {
            flow.held_until = Some(now + Duration::from_nanos(debt.unsigned_abs()));
        }
        if self.latest[0].is_none_or(|(last, _)| last != tenant) {
            self.latest[1] = self.latest[0];
        }
        self.latest[0] = Some((tenant, now));
    }

    /// Removes the items of a session for which `is_removed` holds.
    pub(crate) fn remove(&mut self, keys: FlowKeys, is_removed: impl Fn(&T) -> bool) {
        self.len -= self.tenants.remove(&keys, &is_removed);
    }
}

/// The time of a device that a credit, or a debt, is for a tenant with this share.
fn real_time(credit: i64, share: u32) -> i64 {
    credit.saturating_mul(share.into()) / i64::from(DEFAULT_SHARE)
}

/// Waiting items below one level of keys.
trait Waiting {
    type Item;

    fn is_empty(&self) -> bool;

    fn push(&mut self, keys: &[u64], item: Self::Item);

    /// Removes the next item, with its credit in nanoseconds.
    fn pop(&mut self) -> Option<(Self::Item, i64)>;

    fn charge(&mut self, keys: &[u64], nanos: i64);

    /// Returns the number of removed items.
    fn remove(&mut self, keys: &[u64], is_removed: &dyn Fn(&Self::Item) -> bool) -> usize;
}

/// The items of one session.
impl<T> Waiting for VecDeque<T> {
    type Item = T;

    fn is_empty(&self) -> bool {
        VecDeque::is_empty(self)
    }

    fn push(&mut self, _: &[u64], item: T) {
        self.push_back(item);
    }

    fn pop(&mut self) -> Option<(T, i64)> {
        Some((self.pop_front()?, i64::MAX))
    }

    fn charge(&mut self, _: &[u64], _: i64) {}

    fn remove(&mut self, _: &[u64], is_removed: &dyn Fn(&T) -> bool) -> usize {
        let before = self.len();
        self.retain(|item| !is_removed(item));
        before - self.len()
    }
}

/// Flows that take turns.
struct Ring<C> {
    /// The flows with waiting items, in the order of their visits. `None` ends a round.
    order: VecDeque<Option<u64>>,
    flows: HashMap<u64, Flow<C>>,
    round: u64,
}

/// A tenant or a session.
struct Flow<C> {
    waiting: C,
    /// Nanoseconds for which it may still be served, weighted by its share. Negative: its debt.
    credit: i64,
    /// For a tenant: the share with which its last turn was charged.
    share: u32,
    /// Whether its visit has begun.
    is_visited: bool,
    /// For a tenant in debt: the time at which the passage of time alone has paid the debt.
    held_until: Option<Instant>,
    /// The round in which it left the ring, if it has.
    left: u64,
}

impl<C> Default for Ring<C> {
    fn default() -> Ring<C> {
        Ring { order: VecDeque::from([None]), flows: HashMap::new(), round: 0 }
    }
}

impl<C> Flow<C> {
    /// The credit with which it comes back in `round`: what is left of its last grant, for [`KEPT_ROUNDS`]; or its debt, less the
    /// grants that it was not there to get.
    fn credit_in(&self, round: u64) -> i64 {
        let missed = round.saturating_sub(self.left);
        if self.credit > 0 {
            return if missed <= KEPT_ROUNDS { self.credit } else { 0 };
        }
        self.credit.saturating_add(i64::try_from(missed).unwrap_or(i64::MAX).saturating_mul(GRANT)).min(0)
    }
}

impl<C: Waiting + Default> Ring<C> {
    fn flow(&mut self, key: u64) -> &mut Flow<C> {
        let (round, waiting) = (self.round, self.order.len());
        if self.flows.len() >= 2 * waiting + KEPT_FLOWS && !self.flows.contains_key(&key) {
            self.flows.retain(|_, flow| !flow.waiting.is_empty() || flow.credit_in(round) != 0);
        }
        self.flows.entry(key).or_insert_with(|| Flow {
            waiting: C::default(),
            credit: 0,
            share: DEFAULT_SHARE,
            is_visited: false,
            held_until: None,
            left: round,
        })
    }

    /// The key of the only flow with waiting items.
    fn only_key(&self) -> Option<u64> {
        // Beside the end of the round.
        (self.order.len() == 2).then(|| self.order.iter().flatten().next().copied())?
    }

    fn end_round_if_empty(&mut self) {
        self.round += u64::from(self.order.len() == 1);
    }

    /// Removes the next item, with the key of its flow and its credit in nanoseconds.
    fn pop_next(&mut self) -> Option<(u64, C::Item, i64)> {
        if self.is_empty() {
            return None;
        }
        loop {
            let Some(key) = *self.order.front()? else {
                self.round += 1;
                self.order.rotate_left(1);
                continue;
            };
            let flow = self.flows.get_mut(&key)?;
            if !std::mem::replace(&mut flow.is_visited, true) {
                flow.credit += GRANT;
            }
            if flow.credit <= MIN_CREDIT {
                flow.is_visited = false;
                self.order.rotate_left(1);
                continue;
            }
            let (item, credit) = flow.waiting.pop()?;
            let credit = credit.min(flow.credit);
            if flow.waiting.is_empty() {
                flow.left = self.round;
                self.order.pop_front();
                self.end_round_if_empty();
            }
            return Some((key, item, credit));
        }
    }
}

impl<C: Waiting + Default> Waiting for Ring<C> {
    type Item = C::Item;

    fn is_empty(&self) -> bool {
        // The end of the round is always there.
        self.order.len() == 1
    }

    fn push(&mut self, keys: &[u64], item: C::Item) {
        let (Some((&key, rest)), round) = (keys.split_first(), self.round) else { return };
        let flow = self.flow(key);
        let joins = flow.waiting.is_empty();
        flow.waiting.push(rest, item);
        if joins {
            flow.credit = flow.credit_in(round);
            flow.is_visited &= flow.credit > MIN_CREDIT;
            if flow.is_visited {
                self.order.push_front(Some(key));
            } else {
                self.order.push_back(Some(key));
            }
        }
    }

    fn pop(&mut self) -> Option<(C::Item, i64)> {
        self.pop_next().map(|(_, item, credit)| (item, credit))
    }

    fn charge(&mut self, keys: &[u64], nanos: i64) {
        let Some((&key, rest)) = keys.split_first() else { return };
        let flow = self.flow(key);
        flow.credit = flow.credit.saturating_sub(nanos).max(-MAX_DEBT);
        flow.waiting.charge(rest, nanos);
    }

    fn remove(&mut self, keys: &[u64], is_removed: &dyn Fn(&C::Item) -> bool) -> usize {
        let (Some((&key, rest)), round) = (keys.split_first(), self.round) else { return 0 };
        let Some(flow) = self.flows.get_mut(&key).filter(|flow| !flow.waiting.is_empty()) else { return 0 };
        let removed = flow.waiting.remove(rest, is_removed);
        if flow.waiting.is_empty() {
            flow.left = round;
            self.order.retain(|other| *other != Some(key));
            self.end_round_if_empty();
        }
        removed
    }
}

#[cfg(test)]
mod tests;
