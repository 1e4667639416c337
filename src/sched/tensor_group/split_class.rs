//! Split classes: sets of tensor dimensions that are split at the same relative positions.
//!
//! An op may require that two operands are split alike: the rows of a weight and the columns of the next one, or the heads of
//! queries and of keys. Their dimensions may differ in length, so a class has relative positions: a class with 8 *divisions*
//! may be split at multiples of 1/8 of the dimension. Every requirement (whole heads, whole blocks of a quantised type) is a
//! number that the divisions must divide, so that a class keeps the greatest common divisor. The classes are a disjoint-set forest
//! (union-find).

use std::ops::Range;

/// Index of a class in its [`SplitClasses`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct ClassId(usize);

/// All classes of a task.
#[derive(Clone, Debug, Default)]
pub(super) struct SplitClasses {
    classes: Vec<Class>,
}

#[derive(Clone, Debug)]
struct Class {
    /// The class that this one was merged into.
    merged_into: Option<ClassId>,
    group: usize,
    cuts: Cuts,
    /// Stored weights that are split by rows because of this class; mirroring them undoes it.
    weights: Vec<u32>,
}

/// Where a class may be cut, or is cut.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Cuts {
    /// At any multiples of 1/n.
    Divisions(usize),
    /// Decided before: positions as parts of a length.
    Fixed { at: Vec<usize>, of: usize },
}

impl SplitClasses {
    /// A class that may be cut into `divisions` parts. `None` if the group has more ranks.
    pub(super) fn add(&mut self, group: usize, ranks: usize, divisions: usize, weight: Option<u32>) -> Option<ClassId> {
        (divisions >= ranks).then(|| self.push(group, Cuts::Divisions(divisions), weight))
    }

    /// A class whose positions are decided: `at`, from 0 to `of`.
    pub(super) fn add_fixed(&mut self, group: usize, at: Vec<usize>, of: usize) -> ClassId {
        self.push(group, Cuts::Fixed { at, of }, None)
    }

    fn push(&mut self, group: usize, cuts: Cuts, weight: Option<u32>) -> ClassId {
        self.classes.push(Class { merged_into: None, group, cuts, weights: weight.into_iter().collect() });
        ClassId(self.classes.len() - 1)
    }

    /// The class that this one is merged into, or the class itself.
    pub(super) fn find(&self, mut id: ClassId) -> ClassId {
        while let Some(next) = self.classes[id.0].merged_into {
            id = next;
        }
        id
    }

    pub(super) fn group(&self, id: ClassId) -> usize {
        self.classes[self.find(id).0].group
    }

    /// Slots of the weights whose rows began the class.
    pub(super) fn weights(&self, id: ClassId) -> &[u32] {
        &self.classes[self.find(id).0].weights
    }

    /// Requires that every position is a multiple of 1/`count`. Returns whether the class can be cut so, for `ranks` ranks; if
    /// not, it is unchanged.
    pub(super) fn require(&mut self, id: ClassId, count: usize, ranks: usize) -> bool {
        let id = self.find(id);
        match &mut self.classes[id.0].cuts {
            Cuts::Divisions(divisions) => {
                let both = gcd(*divisions, count);
                let fits = both >= ranks;
                if fits {
                    *divisions = both;
                }
                fits
            }
            Cuts::Fixed { at, of } => at.iter().all(|at| (at * count).is_multiple_of(*of)),
        }
    }

    /// Requires that two classes are cut alike. Returns whether they can be; if not, both are unchanged.
    pub(super) fn merge(&mut self, a: ClassId, b: ClassId, ranks: usize) -> bool {
        let (a, b) = (self.find(a), self.find(b));
        if a == b {
            return true;
        }
        if self.classes[a.0].group != self.classes[b.0].group {
            return false;
        }
        let (keep, merged) = if matches!(self.classes[b.0].cuts, Cuts::Fixed { .. }) { (b, a) } else { (a, b) };
        let fits = match self.classes[merged.0].cuts.clone() {
            Cuts::Divisions(divisions) => self.require(keep, divisions, ranks),
            Cuts::Fixed { at, of } => match &self.classes[keep.0].cuts {
                Cuts::Fixed { at: kept, of: whole } => {
                    at.len() == kept.len() && at.iter().zip(kept).all(|(at, kept)| at * whole == kept * of)
                }
                Cuts::Divisions(_) => false,
            },
        };
        if fits {
            self.classes[merged.0].merged_into = Some(keep);
            let weights = std::mem::take(&mut self.classes[merged.0].weights);
            self.classes[keep.0].weights.extend(weights);
        }
        fits
    }

    /// The parts of a dimension of `length` elements, one for each rank; `shares` are the ranks' shares of the work.
    pub(super) fn parts(&self, id: ClassId, length: usize, shares: &[f32]) -> Option<Vec<Range<usize>>> {
        let cuts = match &self.classes[self.find(id).0].cuts {
            Cuts::Divisions(divisions) => {
                let unit = length / divisions;
                let whole = unit * divisions == length;
                whole.then(|| spread(*divisions, shares).into_iter().map(|at| at * unit).collect::<Vec<_>>())?
            }
            Cuts::Fixed { at, of } => {
                let scaled = |at: &usize| (at * length).is_multiple_of(*of).then(|| at * length / of);
                at.iter().map(scaled).collect::<Option<Vec<_>>>()?
            }
        };
        Some(cuts.windows(2).map(|pair| pair[0]..pair[1]).collect())
    }
}

/// Cuts `total` units by shares: the positions from 0 to `total`. Each rank gets at least one unit; `total` is at least the
/// number of shares.
fn spread(total: usize, shares: &[f32]) -> Vec<usize> {
    let sum: f64 = shares.iter().map(|&share| f64::from(share)).sum();
    let ranks = shares.len();
    let (mut positions, mut before) = (vec![0], 0.0);
    for (rank, &share) in shares.iter().enumerate() {
        before += f64::from(share);
        let ideal = (before / sum * total as f64).round() as usize;
        let last = positions.last().copied().unwrap_or_default();
        positions.push(ideal.clamp(last + 1, total - (ranks - 1 - rank)));
    }
    positions
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_and_nobody_is_left_out() {
        assert_eq!(spread(8, &[1.0, 1.0]), [0, 4, 8]);
        assert_eq!(spread(8, &[3.0, 1.0]), [0, 6, 8]);
        assert_eq!(spread(4, &[1.0; 3]), [0, 1, 3, 4]);
        assert_eq!(spread(3, &[100.0, 1.0, 1.0]), [0, 1, 2, 3]);
        assert_eq!(spread(3, &[1.0, 1.0, 100.0]), [0, 1, 2, 3]);
        assert_eq!(spread(2, &[1.0, 1.0]), [0, 1, 2]);
    }

    #[test]
    fn a_class_keeps_the_common_divisor_of_its_requirements() {
        let mut classes = SplitClasses::default();
        let rows = classes.add(0, 4, 3584, Some(7)).unwrap();
        assert!(classes.require(rows, 28, 4), "28 heads");
        let heads = classes.add(0, 4, 4, None).unwrap();
        assert!(classes.merge(rows, heads, 4));
        assert!(!classes.require(rows, 14, 4), "4 groups of heads and 14 blocks of 256 have 2 common parts");
        assert_eq!(classes.find(rows), classes.find(heads));
        assert_eq!(classes.weights(heads), [7]);
        let parts = classes.parts(heads, 3584, &[1.0; 4]).unwrap();
        assert_eq!(parts, [0..896, 896..1792, 1792..2688, 2688..3584]);
        assert!(classes.add(0, 4, 3, None).is_none());
    }

    #[test]
    fn fixed_classes_keep_their_positions() {
        let mut classes = SplitClasses::default();
        let fixed = classes.add_fixed(0, vec![0, 192, 256], 256);
        let free = classes.add(0, 2, 64, None).unwrap();
        assert!(classes.merge(free, fixed, 2));
        assert_eq!(classes.parts(free, 64, &[1.0, 1.0]).unwrap(), [0..48, 48..64]);
        assert!(!classes.require(free, 2, 2));
        let same = classes.add_fixed(0, vec![0, 3, 4], 4);
        let other = classes.add_fixed(0, vec![0, 1, 4], 4);
        assert!(classes.merge(fixed, same, 2) && !classes.merge(fixed, other, 2));
        let elsewhere = classes.add(1, 2, 64, None).unwrap();
        assert!(!classes.merge(fixed, elsewhere, 2));
    }
}
