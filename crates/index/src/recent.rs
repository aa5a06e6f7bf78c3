//! What a router's own recent decisions have sent where: approximate, short-lived, and never mixed into the index.
//!
//! A decision is known at once; the events that prove what came of it arrive when the engine has computed the prompt,
//! and not at all while the event plane is down. In between, prompts that share a beginning should meet all the same.
//!
//! A hash stands for its whole prefix, so a prompt need not be kept block by block. Marks are set at lengths that lie
//! further apart the longer the prompt is (every length up to [`DENSE_BLOCKS`], then as many in each octave), some
//! hundred marks for a prompt of thousands of blocks; a look-up finds a shared beginning to within a sixteenth.
//! Memory is bounded by the number of marks; the oldest decision makes room for the newest.

use std::{collections::VecDeque, num::NonZeroU64, sync::Arc, time::Duration};

use hashbrown::{HashMap, hash_map::Entry};
use kvist_blocks::{BlockHash, Incarnation, SourceKey};

/// Lengths up to here are all marked.
const DENSE_BLOCKS: usize = 16;

/// One start of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Which rank.
    pub source: SourceKey,
    /// Another start holds nothing of this one's cache.
    pub incarnation: Incarnation,
}

/// What was sent to a holder of a prompt's beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentOverlap {
    /// To whom.
    pub holder: Arc<Holder>,
    /// Leading blocks, within a sixteenth of the truth and never more.
    pub blocks: u32,
    /// How long ago the last decision of them was made.
    pub age: Duration,
}

/// A holder's number among those that have marks, and a time in nanoseconds: marks are many, and each counts.
type HolderNumber = u32;
type Nanoseconds = u64;

#[derive(Clone, Copy, Debug)]
struct Mark {
    holder: HolderNumber,
    decided_at: Nanoseconds,
    /// When it was set before that, and one more, should the last decision be taken back.
    before: Option<NonZeroU64>,
}

/// The marks of one hash. Almost all have one.
#[derive(Clone, Debug)]
enum Marks {
    One(Mark),
    /// Never empty but while it is changed.
    Several(Vec<Mark>),
}

impl Marks {
    fn as_slice(&self) -> &[Mark] {
        match self {
            Self::One(mark) => std::slice::from_ref(mark),
            Self::Several(marks) => marks,
        }
    }

    fn of(&mut self, holder: HolderNumber) -> Option<&mut Mark> {
        let marks = match self {
            Self::One(mark) => std::slice::from_mut(mark),
            Self::Several(marks) => marks,
        };
        marks.iter_mut().find(|mark| mark.holder == holder)
    }

    fn push(&mut self, mark: Mark) {
        match self {
            Self::One(first) => *self = Self::Several(vec![*first, mark]),
            Self::Several(marks) => marks.push(mark),
        }
    }

    /// Keeps some; false when none is left.
    fn retain(&mut self, mut is_kept: impl FnMut(&mut Mark) -> bool) -> bool {
        match self {
            Self::One(mark) => is_kept(mark),
            Self::Several(marks) => {
                marks.retain_mut(is_kept);
                !marks.is_empty()
            }
        }
    }
}

/// What was set by one call of [`RecentDecisions::note`] and is not forgotten.
#[derive(Clone, Copy, Debug)]
struct Decision {
    holder: HolderNumber,
    decided_at: Nanoseconds,
    marks: u32,
}

/// A holder, and how many places in the order are its own.
#[derive(Clone, Debug)]
struct Known {
    holder: Arc<Holder>,
    places: usize,
}

/// The marks of recent decisions. Times are durations since any fixed moment, as the caller's monotonic clock tells.
#[derive(Debug)]
pub struct RecentDecisions {
    most_marks: usize,
    longest_age: Duration,
    marks: HashMap<BlockHash, Marks>,
    /// Holders of marks by number, so that each is kept once, and the numbers that are free.
    holders: Vec<Option<Known>>,
    numbers: HashMap<Arc<Holder>, HolderNumber>,
    free_numbers: Vec<HolderNumber>,
    /// Every mark that was set, oldest first; one that was set anew is here twice, and only the newer place counts.
    order: VecDeque<BlockHash>,
    /// To which decisions they belong, in the same order.
    decisions: VecDeque<Decision>,
}

/// Since the fixed moment; a clock that has run for 500 years stands still.
fn nanoseconds(time: Duration) -> Nanoseconds {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl RecentDecisions {
    /// An empty memory of at most `most_marks` marks, none older than `longest_age`.
    #[must_use]
    pub fn new(most_marks: usize, longest_age: Duration) -> Self {
        Self {
            most_marks,
            longest_age,
            marks: HashMap::new(),
            holders: Vec::new(),
            numbers: HashMap::new(),
            free_numbers: Vec::new(),
            order: VecDeque::new(),
            decisions: VecDeque::new(),
        }
    }

    /// Notes that a prompt of these blocks was sent to a holder.
    pub fn note(&mut self, now: Duration, holder: Holder, prompt: &[BlockHash]) {
        self.forget_old(now);
        let decided_at = nanoseconds(now);
        let hashes = marked_lengths(prompt.len()).filter_map(|length| prompt.get(length.checked_sub(1)?));
        let places = self.order.len();
        self.order.extend(hashes);
        let marks = u32::try_from(self.order.len() - places).unwrap_or(0);
        if marks == 0 {
            return;
        }
        let holder = self.number(holder, marks as usize);
        for hash in self.order.range(places..) {
            let mark = Mark { holder, decided_at, before: None };
            match self.marks.entry(*hash) {
                Entry::Vacant(entry) => {
                    entry.insert(Marks::One(mark));
                }
                Entry::Occupied(mut entry) => match entry.get_mut().of(holder) {
                    Some(known) => {
                        known.before = NonZeroU64::new(known.decided_at.saturating_add(1));
                        known.decided_at = decided_at;
                    }
                    None => entry.get_mut().push(mark),
                },
            }
        }
        self.decisions.push_back(Decision { holder, decided_at, marks });
        while self.order.len() > self.most_marks {
            self.forget_oldest();
        }
    }

    /// The number of a holder that has so many places more.
    fn number(&mut self, holder: Holder, places: usize) -> HolderNumber {
        if let Some(number) = self.numbers.get(&holder) {
            if let Some(Some(known)) = self.holders.get_mut(*number as usize) {
                known.places += places;
            }
            return *number;
        }
        let holder = Arc::new(holder);
        let known = Some(Known { holder: Arc::clone(&holder), places });
        let number = match self.free_numbers.pop() {
            Some(number) => {
                self.holders[number as usize] = known;
                number
            }
            None => {
                self.holders.push(known);
                u32::try_from(self.holders.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.numbers.insert(holder, number);
        number
    }

    /// Takes back what was noted at a time: the holder has refused the prompt. What was noted before stays.
    pub fn take_back(&mut self, noted_at: Duration, holder: &Holder, prompt: &[BlockHash]) {
        let noted_at = nanoseconds(noted_at);
        let Some(&holder) = self.numbers.get(holder) else { return };
        for length in marked_lengths(prompt.len()) {
            let hash = length.checked_sub(1).and_then(|position| prompt.get(position));
            let Some(Entry::Occupied(mut entry)) = hash.map(|hash| self.marks.entry(*hash)) else { continue };
            let is_kept = entry.get_mut().retain(|mark| {
                if mark.holder != holder || mark.decided_at != noted_at {
                    return true;
                }
                mark.before.take().is_some_and(|before| {
                    mark.decided_at = before.get() - 1;
                    true
                })
            });
            if !is_kept {
                entry.remove();
            }
        }
    }

    /// What recent decisions have sent where of a prompt's beginning: the longest for each holder.
    #[must_use]
    pub fn look_up(&self, now: Duration, prompt: &[BlockHash]) -> Vec<RecentOverlap> {
        let mut overlaps: Vec<RecentOverlap> = Vec::new();
        if self.marks.is_empty() {
            return overlaps;
        }
        let mut found: Vec<HolderNumber> = Vec::new();
        let lengths: Vec<usize> = marked_lengths(prompt.len()).collect();
        for length in lengths.into_iter().rev() {
            let hash = length.checked_sub(1).and_then(|position| prompt.get(position));
            for mark in hash.and_then(|hash| self.marks.get(hash)).map(Marks::as_slice).unwrap_or_default() {
                let age = Duration::from_nanos(nanoseconds(now).saturating_sub(mark.decided_at));
                if age <= self.longest_age
                    && !found.contains(&mark.holder)
                    && let Some(Some(known)) = self.holders.get(mark.holder as usize)
                {
                    found.push(mark.holder);
                    let blocks = u32::try_from(length).unwrap_or(u32::MAX);
                    overlaps.push(RecentOverlap { holder: Arc::clone(&known.holder), blocks, age });
                }
            }
        }
        overlaps
    }

    /// Marks that are kept, those that were set anew counted each time.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Bytes allocated, free room in the tables included; what hashes that were sent to several holders take beyond
    /// their first is left out.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.marks.allocation_size()
            + self.order.capacity() * size_of::<BlockHash>()
            + self.decisions.capacity() * size_of::<Decision>()
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn forget_old(&mut self, now: Duration) {
        let (now, longest_age) = (nanoseconds(now), nanoseconds(self.longest_age));
        while self.decisions.front().is_some_and(|oldest| now.saturating_sub(oldest.decided_at) > longest_age) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let (Some(hash), Some(oldest)) = (self.order.pop_front(), self.decisions.front_mut()) else { return };
        oldest.marks -= 1;
        let decision = *oldest;
        if decision.marks == 0 {
            self.decisions.pop_front();
        }
        if let Entry::Occupied(mut entry) = self.marks.entry(hash) {
            // One that was set anew since has a later time, and a later place in the order.
            let is_later = |mark: &mut Mark| mark.holder != decision.holder || mark.decided_at > decision.decided_at;
            if !entry.get_mut().retain(is_later) {
                entry.remove();
            }
        }
        // A mark is never older than the last place of its holder, so whoever has no place has no mark.
        let Some(slot) = self.holders.get_mut(decision.holder as usize) else { return };
        if let Some(known) = slot {
            known.places -= 1;
            if known.places == 0 {
                self.numbers.remove(&known.holder);
                self.free_numbers.push(decision.holder);
                *slot = None;
            }
        }
    }
}

/// The lengths of a prompt, in blocks, that carry a mark: ascending, and the same for every prompt that is long enough.
fn marked_lengths(blocks: usize) -> impl Iterator<Item = usize> {
    let mut next: usize = 1;
    std::iter::from_fn(move || {
        let length = next;
        let step = length.checked_div(DENSE_BLOCKS).map_or(1, |octave| prior_power_of_two(octave.max(1)));
        next = length + step;
        (length <= blocks).then_some(length)
    })
}

fn prior_power_of_two(number: usize) -> usize {
    number.checked_ilog2().map_or(1, |exponent| 1 << exponent)
}

#[cfg(test)]
mod tests {
    use kvist_blocks::Rank;
    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn holder(name: u64) -> Holder {
        let source = SourceKey { worker: format!("w{name}").as_str().into(), rank: Rank(0) };
        Holder { source, incarnation: Incarnation(1) }
    }

    /// A prompt of a family: prompts of one family share the first `shared` blocks.
    fn prompt(family: u64, branch: u64, shared: usize, blocks: usize) -> Vec<BlockHash> {
        let hash = |position: usize| {
            let branch = if position < shared { 0 } else { branch + 1 };
            BlockHash((family << 48) | (branch << 32) | position as u64)
        };
        (0..blocks).map(hash).collect()
    }

    #[test]
    fn lengths_are_dense_first_and_then_a_sixteenth_apart() {
        let lengths: Vec<usize> = marked_lengths(6_250).collect();
        assert_eq!((1..=32).collect::<Vec<_>>(), lengths[..32]);
        assert_eq!([34, 36], lengths[32..34]);
        assert!(lengths.windows(2).all(|pair| pair[1] - pair[0] <= pair[0].div_ceil(DENSE_BLOCKS)));
        assert!(lengths.len() < 160, "{}", lengths.len());
    }

    #[test]
    fn a_sibling_meets_the_first_and_a_later_start_does_not() {
        let mut recent = RecentDecisions::new(1_000, TTL);
        assert_eq!(0, recent.bytes());
        recent.note(Duration::ZERO, holder(1), &prompt(1, 0, 20, 40));
        assert!(recent.bytes() >= recent.len() * (size_of::<(BlockHash, Marks)>() + size_of::<BlockHash>()));
        let found = recent.look_up(Duration::from_secs(1), &prompt(1, 1, 20, 60));
        assert_eq!(vec![(1, 20)], found.iter().map(|one| (one.holder.incarnation.0, one.blocks)).collect::<Vec<_>>());
        assert!(recent.look_up(TTL * 2, &prompt(1, 1, 20, 60)).is_empty());
        assert!(recent.look_up(Duration::ZERO, &prompt(2, 0, 20, 60)).is_empty());
    }

    #[test]
    fn what_is_taken_back_leaves_what_was_sent_before_and_elsewhere() {
        let mut recent = RecentDecisions::new(1_000, TTL);
        let [first, second] = [1, 2].map(Duration::from_secs);
        let found = |recent: &RecentDecisions| {
            let found = recent.look_up(second, &prompt(1, 1, 20, 40));
            let mut found: Vec<_> =
                found.iter().map(|one| (one.holder.source.worker.to_string(), one.blocks, one.age)).collect();
            found.sort();
            found
        };
        recent.note(first, holder(1), &prompt(1, 0, 20, 40));
        recent.note(second, holder(1), &prompt(1, 1, 20, 40));
        recent.note(second, holder(2), &prompt(1, 1, 20, 40));
        assert_eq!([40, 40], found(&recent).iter().map(|one| one.1).collect::<Vec<_>>()[..]);
        recent.take_back(second, &holder(1), &prompt(1, 1, 20, 40));
        let (age, other) = (second - first, ("w2".to_owned(), 40, Duration::ZERO));
        assert_eq!(vec![("w1".to_owned(), 20, age), other.clone()], found(&recent));
        // Once is enough, and another time is another decision.
        recent.take_back(second, &holder(1), &prompt(1, 1, 20, 40));
        recent.take_back(first, &holder(2), &prompt(1, 1, 20, 40));
        assert_eq!(vec![("w1".to_owned(), 20, age), other], found(&recent));
        recent.take_back(second, &holder(2), &prompt(1, 1, 20, 40));
        assert_eq!(vec![("w1".to_owned(), 20, age)], found(&recent));
        // What is gone makes no trouble when its time would have come.
        recent.note(second + 2 * TTL, holder(3), &prompt(2, 0, 20, 40));
        assert!(recent.look_up(second + 2 * TTL, &prompt(1, 1, 20, 40)).is_empty());
    }

    proptest! {
        /// Against all decisions in full: never more than was sent, and within a sixteenth of it.
        #[test]
        fn an_overlap_is_what_was_sent_or_a_little_less(
            notes in prop::collection::vec((0u64..3, 0u64..3, 0u64..3, 1usize..200), 1..20),
            asked in (0u64..3, 0u64..3, 1usize..200),
        ) {
            let shared = 50;
            let mut recent = RecentDecisions::new(100_000, TTL);
            for (family, branch, to, blocks) in &notes {
                recent.note(Duration::ZERO, holder(*to), &prompt(*family, *branch, shared, *blocks));
            }
            let wanted = prompt(asked.0, asked.1, shared, asked.2);
            let found = recent.look_up(Duration::ZERO, &wanted);
            for to in 0..3 {
                let sent = notes.iter().filter(|note| note.2 == to).map(|(family, branch, _, blocks)| {
                    let sent = prompt(*family, *branch, shared, *blocks);
                    wanted.iter().zip(&sent).take_while(|(left, right)| left == right).count()
                }).max().unwrap_or(0);
                let blocks = found.iter().find(|one| *one.holder == holder(to)).map_or(0, |one| one.blocks as usize);
                prop_assert!(blocks <= sent && sent - blocks <= sent / DENSE_BLOCKS, "{blocks} of {sent}");
            }
        }

        /// Whatever comes and goes, the bound holds, and nothing is left when all is old.
        #[test]
        fn memory_is_bounded_and_returns(
            notes in prop::collection::vec((0u64..5, 0u64..5, 1usize..100, 0u64..3_000), 1..60),
        ) {
            let mut recent = RecentDecisions::new(200, TTL);
            let mut now = Duration::ZERO;
            for (family, to, blocks, pause_ms) in notes {
                now += Duration::from_millis(pause_ms);
                recent.note(now, holder(to), &prompt(family, 0, 200, blocks));
                prop_assert!(recent.len() <= 200);
                let kept: usize = recent.marks.values().map(|marks| marks.as_slice().len()).sum();
                prop_assert!(kept <= recent.len());
            }
            recent.forget_old(now + TTL * 2);
            prop_assert!(recent.is_empty() && recent.marks.is_empty() && recent.numbers.is_empty());
            prop_assert!(recent.decisions.is_empty() && recent.holders.iter().all(Option::is_none));
        }
    }
}
