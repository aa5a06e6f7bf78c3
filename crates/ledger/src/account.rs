//! The account of one rank of one incarnation.

use std::{ops::AddAssign, sync::Arc};

use hashbrown::HashMap;
use kvist_blocks::{Batch, BlockHash, BlockHasher, Event, HashSeed, Namespace, Tier, TierDigest};

use crate::{
    BlockKey, BlockKeys, DescribedBlocks, EngineEvent, EngineHash, Place, RangeLost, StoredBlocks,
    hint::Hints,
    ring::Ring,
    runs::runs,
    tier::{Content, Taken, TierAccount},
};

/// Unless the caller says otherwise.
const HINT_TIME_TO_LIVE_NANOS: u64 = 600 * 1_000_000_000;
const MOST_HINTS: usize = 1 << 16;

/// How a ledger is kept.
#[derive(Clone, Copy, Debug)]
pub struct LedgerSettings {
    /// Batches that the ring holds.
    pub ring_batches: usize,
    /// Tokens a block.
    pub block_size_tokens: usize,
}

/// What went wrong or was not taken at its word, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounters {
    /// Blocks left out because their parent was not known.
    pub unknown_parents: u64,
    /// Blocks left out because the engine named them without their tokens, and they were not known from elsewhere.
    pub unknown_contents: u64,
    /// Blocks left out because nobody knows the adapter they belong to.
    pub unknown_namespaces: u64,
    /// Blocks left out because the engine does not say what separates them beside tokens.
    pub unstated_keys: u64,
    /// Blocks left out because the engine's block is no multiple of the ledger's.
    pub odd_block_sizes: u64,
    /// Blocks left out because the engine used one hash for two contents.
    pub conflicting_hashes: u64,
    /// Proofs that an engine has hidden keys though its caller vouched for it; each ended all claims.
    pub broken_vouches: u64,
    /// Blocks that were described again and got no further copy for it.
    pub repeated_blocks: u64,
    /// Blocks that are no longer held because a cache group appeared that does not hold them.
    pub hidden_by_groups: u64,
    /// Blocks taken as hints.
    pub hinted_blocks: u64,
    /// Removals of blocks that were not held.
    pub unknown_removals: u64,
    /// Events whose tokens did not fill their blocks.
    pub malformed_events: u64,
    /// Stored blocks that could not be understood, by events.
    pub unreadable_events: u64,
    /// Events older than an ordered clear.
    pub events_before_clear: u64,
    /// Clears that arrived when nothing was held.
    pub empty_clears: u64,
    /// Holes in the engine's own stream.
    pub lost_events: u64,
}

impl AddAssign for LedgerCounters {
    fn add_assign(&mut self, other: Self) {
        let Self {
            unknown_parents,
            unknown_contents,
            unknown_namespaces,
            unstated_keys,
            odd_block_sizes,
            conflicting_hashes,
            broken_vouches,
            repeated_blocks,
            hidden_by_groups,
            hinted_blocks,
            unknown_removals,
            malformed_events,
            unreadable_events,
            events_before_clear,
            empty_clears,
            lost_events,
        } = other;
        self.unknown_parents += unknown_parents;
        self.unknown_contents += unknown_contents;
        self.unknown_namespaces += unknown_namespaces;
        self.unstated_keys += unstated_keys;
        self.odd_block_sizes += odd_block_sizes;
        self.conflicting_hashes += conflicting_hashes;
        self.broken_vouches += broken_vouches;
        self.repeated_blocks += repeated_blocks;
        self.hidden_by_groups += hidden_by_groups;
        self.hinted_blocks += hinted_blocks;
        self.unknown_removals += unknown_removals;
        self.malformed_events += malformed_events;
        self.unreadable_events += unreadable_events;
        self.events_before_clear += events_before_clear;
        self.empty_clears += empty_clears;
        self.lost_events += lost_events;
    }
}

/// All that a rank holds, at a position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The sequence the batch after it will carry.
    pub next_sequence: u64,
    /// Blocks by tier, as runs, a block after the one that it follows wherever that is held too; tiers without blocks are
    /// left out.
    pub blocks: Vec<(Tier, Vec<kvist_blocks::Run>)>,
    /// Whether the engine's history was seen without a hole.
    pub complete: bool,
}

impl Snapshot {
    /// The blocks by tier, without what follows what.
    #[must_use]
    pub fn sets(&self) -> Vec<(Tier, Vec<BlockHash>)> {
        let hashes = |runs: &[kvist_blocks::Run]| runs.iter().flat_map(|run| run.hashes.iter().copied()).collect();
        self.blocks.iter().map(|(tier, runs)| (*tier, hashes(runs))).collect()
    }
}

/// The account in a few bytes, at a position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerDigest {
    /// The sequence the next batch will carry.
    pub next_sequence: u64,
    /// One for each tier that was ever used.
    pub tiers: Vec<TierDigest>,
    /// Whether the engine's history was seen without a hole.
    pub complete: bool,
}

/// Collects newly held blocks into events, one for each run in which every block is the parent of the next.
struct Runs<'a> {
    tier: Tier,
    parent: Option<BlockHash>,
    hashes: Vec<BlockHash>,
    visible: &'a mut Vec<Event>,
}

impl<'a> Runs<'a> {
    fn new(tier: Tier, visible: &'a mut Vec<Event>) -> Self {
        Self { tier, parent: None, hashes: Vec::new(), visible }
    }

    fn push(&mut self, parent: Option<BlockHash>, block: BlockHash) {
        if self.hashes.is_empty() {
            self.parent = parent;
        }
        self.hashes.push(block);
    }

    fn close(&mut self) {
        if !self.hashes.is_empty() {
            let hashes = std::mem::take(&mut self.hashes);
            self.visible.push(Event::Stored { tier: self.tier, parent: self.parent, hashes });
        }
    }
}

/// The exact account of the blocks that one rank holds.
#[derive(Debug)]
pub struct Ledger {
    settings: LedgerSettings,
    counting: bool,
    tiers: [TierAccount; 4],
    hints: Hints,
    ring: Ring,
    next_sequence: u64,
    /// Whether something was stored that is not in the account, and may be held still.
    is_missing_some: bool,
    /// Engine blocks in the account whose contents are not known.
    unrecognised: u64,
    awaits_clear: bool,
    /// The engine's names of blocks whose keys were vouched for, until the vouch is broken.
    vouched: HashMap<BlockHash, EngineHash>,
    is_vouch_broken: bool,
    counters: LedgerCounters,
    ended_claims: u64,
}

impl Ledger {
    /// An empty account at sequence 0.
    #[must_use]
    pub fn new(settings: LedgerSettings) -> Self {
        Self {
            settings,
            counting: true,
            tiers: Default::default(),
            hints: Hints::new(HINT_TIME_TO_LIVE_NANOS, MOST_HINTS),
            ring: Ring::new(settings.ring_batches),
            next_sequence: 0,
            is_missing_some: false,
            unrecognised: 0,
            awaits_clear: false,
            vouched: HashMap::new(),
            is_vouch_broken: false,
            counters: LedgerCounters::default(),
            ended_claims: 0,
        }
    }

    /// Whether copies in the device tier are counted, which is the default: right for an engine of which every event is
    /// seen. Without it a block is gone with its first removal, which may claim too little and never too much. The other
    /// tiers are sets in either case, since what fills them may announce one copy twice.
    ///
    /// To be said before the first event.
    #[must_use]
    pub fn counting(mut self, counting: bool) -> Self {
        self.counting = counting;
        self
    }

    /// How long a hint lives, in nanoseconds, and how many there may be.
    ///
    /// To be said before the first event.
    #[must_use]
    pub fn hints(mut self, time_to_live_nanos: u64, most: usize) -> Self {
        self.hints = Hints::new(time_to_live_nanos, most);
        self
    }

    /// Takes what the engine said and returns the batch that says so, if anything visible changed. A batch is made for
    /// nothing else, so that sequences stand for changes.
    pub fn apply(&mut self, now_unix_nanos: u64, events: &[EngineEvent]) -> Option<Arc<Batch>> {
        self.hints.expire(now_unix_nanos);
        let mut visible = Vec::new();
        for event in events {
            self.apply_event(now_unix_nanos, event, &mut visible);
        }
        if visible.is_empty() {
            return None;
        }
        self.ended_claims += visible.iter().filter(|event| !matches!(event, Event::Stored { .. })).count() as u64;
        let batch =
            Arc::new(Batch { sequence: self.next_sequence, recorded_at_unix_nanos: now_unix_nanos, events: visible });
        self.next_sequence += 1;
        self.ring.push(Arc::clone(&batch));
        Some(batch)
    }

    fn apply_event(&mut self, now: u64, event: &EngineEvent, visible: &mut Vec<Event>) {
        let ends_wait = matches!(event, EngineEvent::Cleared | EngineEvent::PoolCleared | EngineEvent::Lost);
        if self.awaits_clear && !ends_wait {
            self.counters.events_before_clear += 1;
            return;
        }
        match event {
            EngineEvent::Stored(stored) => self.store(now, stored, visible),
            EngineEvent::Described(blocks) => self.describe(now, blocks, visible),
            EngineEvent::Removed { hashes, tier } => self.remove(hashes, Place::sole(*tier), visible),
            EngineEvent::RemovedFrom { hashes, place } => self.remove(hashes, *place, visible),
            EngineEvent::Cleared | EngineEvent::PoolCleared => {
                let lower_tiers = &self.tiers[Tier::Host.position()..];
                let is_known_empty = *event == EngineEvent::Cleared || !lower_tiers.iter().any(|tier| tier.is_used);
                if !self.forget_all(visible) {
                    self.counters.empty_clears += 1;
                }
                // An empty cache is known whatever was missed before.
                self.is_missing_some = !is_known_empty;
                self.awaits_clear = false;
            }
            EngineEvent::ClearOrdered => {
                self.forget_all(visible);
                self.awaits_clear = true;
            }
            EngineEvent::Unreadable => {
                self.counters.unreadable_events += 1;
                self.is_missing_some = true;
            }
            EngineEvent::Lost => {
                // What was missed may have been removals, and then claims would be false: start over. If it was the
                // clear that is waited for, only the next one ends the wait: what comes may still be older.
                self.forget_all(visible);
                self.is_missing_some = true;
                self.counters.lost_events += 1;
            }
        }
    }

    /// Batches after `last_applied`, or from 0 when none was applied.
    ///
    /// # Errors
    /// The ring no longer holds them, or the position is in the future.
    pub fn range_after(&self, last_applied: Option<u64>) -> Result<Vec<Arc<Batch>>, RangeLost> {
        self.ring.from(last_applied.map_or(0, |sequence| sequence.saturating_add(1)), self.next_sequence)
    }

    /// The sequence the next batch will carry.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// All blocks, and what follows what.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let blocks = Tier::ALL
            .into_iter()
            .map(|tier| (tier, runs(self.tiers[tier.position()].blocks())))
            .filter(|(_, runs)| !runs.is_empty())
            .collect();
        Snapshot { next_sequence: self.next_sequence, blocks, complete: self.is_complete() }
    }

    /// Count and digest of each tier.
    #[must_use]
    pub fn digest(&self) -> LedgerDigest {
        let tiers = Tier::ALL
            .into_iter()
            .zip(&self.tiers)
            .filter(|(_, account)| account.is_used)
            .map(|(tier, account)| TierDigest { tier, block_count: account.block_count, digest: account.digest })
            .collect();
        LedgerDigest { next_sequence: self.next_sequence, tiers, complete: self.is_complete() }
    }

    /// Whether everything that the engine holds is in the account.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.is_missing_some && !self.awaits_clear && self.unrecognised == 0
    }

    /// How many leading blocks of a prompt the device tier holds, in every cache group.
    #[must_use]
    pub fn claimed_prefix_blocks(&self, prompt: &[BlockHash]) -> usize {
        let device = &self.tiers[Tier::Device.position()];
        prompt.iter().take_while(|hash| device.contains(**hash)).count()
    }

    /// How many leading blocks of a prompt a medium may hold that never reports removals. No claim.
    #[must_use]
    pub fn hinted_prefix_blocks(&self, now_unix_nanos: u64, prompt: &[BlockHash]) -> usize {
        prompt.iter().take_while(|hash| self.hints.contains(**hash, now_unix_nanos)).count()
    }

    /// Hints that are kept.
    #[must_use]
    pub fn hint_count(&self) -> usize {
        self.hints.len()
    }

    /// Distinct blocks over all tiers.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.tiers.iter().map(|account| account.block_count).sum()
    }

    /// Removals and clears that ended claims. While the number stands still, every claim that was made still holds.
    #[must_use]
    pub fn ended_claims(&self) -> u64 {
        self.ended_claims
    }

    /// What went wrong since the start.
    #[must_use]
    pub fn counters(&self) -> LedgerCounters {
        self.counters
    }

    fn store(&mut self, now: u64, stored: &StoredBlocks, visible: &mut Vec<Event>) {
        let StoredBlocks { hashes, parent, tokens, tier, root } = stored;
        let run = Run {
            hashes,
            parent: *parent,
            tokens,
            block_size_tokens: self.settings.block_size_tokens,
            place: Place::sole(*tier),
            root: Some(*root),
            keys: &BlockKeys::Stated(Vec::new()),
        };
        if !tokens.is_empty() && tokens.len() != hashes.len().saturating_mul(run.block_size_tokens) {
            self.counters.malformed_events += 1;
            self.is_missing_some = true;
            return;
        }
        self.take(now, &run, false, visible);
    }

    fn describe(&mut self, now: u64, blocks: &DescribedBlocks, visible: &mut Vec<Event>) {
        let DescribedBlocks { hashes, parent, tokens, block_size_tokens, place, root, keys, may_repeat } = blocks;
        let run = Run {
            hashes,
            parent: *parent,
            tokens,
            block_size_tokens: *block_size_tokens,
            place: *place,
            root: *root,
            keys,
        };
        if !tokens.is_empty() && tokens.len() < hashes.len().saturating_mul(*block_size_tokens) {
            self.counters.malformed_events += 1;
            self.is_missing_some = true;
            return;
        }
        self.take(now, &run, *may_repeat && parent.is_none(), visible);
    }

    /// Takes a run in. One that may be a repetition adds no copies to blocks that are held, also behind one that is
    /// not: that one's own event may have been unreadable.
    fn take(&mut self, now: u64, run: &Run<'_>, may_repeat: bool, visible: &mut Vec<Event>) {
        let Some(contents) = self.contents(run, visible) else { return };
        let Place { tier, group, is_hint } = run.place;
        if is_hint {
            self.counters.hinted_blocks += contents.len() as u64;
            for (engine_hash, content) in run.hashes.iter().zip(contents) {
                self.hints.take(*engine_hash, content, now);
            }
            return;
        }
        let counts = self.counting && tier == Tier::Device;
        let (position, hidden) = self.tiers[tier.position()].group(group);
        if hidden > 0 {
            self.counters.hidden_by_groups += hidden;
            visible.push(Event::Cleared { tier: Some(tier) });
        }
        // Without all the tokens the order of the hashes says nothing about parents.
        let is_run = !run.tokens.is_empty() && !run.has_gaps();
        let mut previous = run.parent.and_then(|parent| self.last_block_of(parent));
        let mut runs = Runs::new(tier, visible);
        let mut conflict = None;
        let mut learned = Vec::new();
        for (number, (engine_hash, content)) in run.hashes.iter().zip(contents).enumerate() {
            let before = previous.filter(|_| is_run).or_else(|| self.known_parent(&content));
            let account = &mut self.tiers[tier.position()];
            let repeats = may_repeat && counts && account.groups[position].held.contains_key(engine_hash);
            self.counters.repeated_blocks += u64::from(repeats);
            if matches!(run.keys, BlockKeys::Vouched)
                && !self.is_vouch_broken
                && let Some(block) = content.last()
            {
                self.vouched.insert(block, *engine_hash);
            }
            if content.is_unknown() {
                previous = None;
                runs.close();
            } else if self.unrecognised > 0 {
                learned.push((*engine_hash, content.clone()));
            }
            let taken = account.take(position, *engine_hash, content, counts && !repeats, before, |block, is_new| {
                if !is_new || !is_run {
                    runs.close();
                }
                if is_new {
                    runs.push(previous.filter(|_| is_run), block);
                }
                previous = Some(block);
            });
            match taken {
                Taken::Held => {}
                Taken::Recognised => self.unrecognised -= 1,
                Taken::Unrecognised => self.unrecognised += 1,
                Taken::Conflict => {
                    conflict = Some((number, *engine_hash));
                    break;
                }
            }
        }
        runs.close();
        if let Some((number, engine_hash)) = conflict {
            // Neither content can be claimed, nor anything that follows the block of two contents.
            self.counters.conflicting_hashes += (run.hashes.len() - number) as u64;
            self.is_missing_some = true;
            self.forget(engine_hash, visible);
        }
        for (engine_hash, content) in learned {
            self.recognise(group, engine_hash, &content, visible);
        }
    }

    /// Kvist's names for the blocks of a run, as far as they can be known; none when there is nothing to take in.
    fn contents(&mut self, run: &Run<'_>, visible: &mut Vec<Event>) -> Option<Vec<Content>> {
        let count = run.hashes.len();
        if count == 0 {
            return None;
        }
        let unit = self.settings.block_size_tokens;
        if run.tokens.is_empty() {
            let known = |hash| self.known_content(hash, 0, |group, _| group == run.place.group);
            let contents: Vec<_> = run.hashes.iter().map(|hash| known(*hash)).collect();
            self.counters.unknown_contents += unknown(&contents);
            return Some(contents);
        }
        let units = run.block_size_tokens.checked_div(unit).unwrap_or(0);
        if units == 0 || units * unit != run.block_size_tokens {
            self.counters.odd_block_sizes += count as u64;
            return Some(vec![Content::Unknown(0); count]);
        }
        let parent = match run.parent {
            None => run.root,
            Some(parent) => self.last_block_of(parent),
        };
        // Blocks were left out: what the others are, tokens alone do not say.
        let has_gaps = run.has_gaps();
        if let (Some(parent), false) = (parent, has_gaps) {
            let keys: &[BlockKey] = match run.keys {
                BlockKeys::Stated(keys) => keys,
                BlockKeys::Vouched | BlockKeys::Unstated => &[],
            };
            let is_plain = matches!(run.keys, BlockKeys::Vouched) && !self.is_vouch_broken;
            if is_plain || matches!(run.keys, BlockKeys::Stated(_)) {
                let blocks = hash_run(parent, run.tokens, unit, keys);
                let contents: Vec<_> = blocks.chunks(units).map(Content::from_blocks).collect();
                if is_plain && self.breaks_vouch(run, &contents) {
                    self.counters.broken_vouches += 1;
                    self.is_vouch_broken = true;
                    self.forget_all(visible);
                    self.is_missing_some = true;
                    return None;
                }
                return Some(contents);
            }
        }
        let known = |hash| self.known_content(hash, units, |_, blocks| blocks == units);
        let contents: Vec<_> = run.hashes.iter().map(|hash| known(*hash)).collect();
        let reason = match (parent, has_gaps) {
            (None, _) if run.parent.is_some() => &mut self.counters.unknown_parents,
            (None, _) => &mut self.counters.unknown_namespaces,
            (Some(_), true) => &mut self.counters.unknown_contents,
            (Some(_), false) => &mut self.counters.unstated_keys,
        };
        *reason += unknown(&contents);
        Some(contents)
    }

    /// An engine's hash covers all that separates blocks: two of them for the same tokens after the same parent mean
    /// that something is not said.
    fn breaks_vouch(&self, run: &Run<'_>, contents: &[Content]) -> bool {
        run.hashes.iter().zip(contents).any(|(engine_hash, content)| {
            let known = content.last().and_then(|block| self.vouched.get(&block));
            known.is_some_and(|known| known != engine_hash)
        })
    }

    /// The content behind an engine's hash, from any place whose group and number of blocks will do. A hash means the
    /// same in every tier and group, up to where its block begins.
    fn known_content(&self, engine_hash: EngineHash, units: usize, will_do: impl Fn(u32, usize) -> bool) -> Content {
        let groups = self.tiers.iter().flat_map(|tier| &tier.groups);
        groups
            .filter_map(|group| Some((group.number, &group.held.get(&engine_hash)?.content)))
            .find(|(group, content)| !content.is_unknown() && will_do(*group, content.blocks().len()))
            .map_or(Content::Unknown(units), |(_, content)| content.clone())
    }

    /// The last block behind an engine's hash, wherever it lies: a block that moves down may follow one that is only
    /// above.
    fn last_block_of(&self, engine_hash: EngineHash) -> Option<BlockHash> {
        let groups = self.tiers.iter().flat_map(|tier| &tier.groups);
        groups
            .filter_map(|group| group.held.get(&engine_hash)?.content.last())
            .next()
            .or_else(|| self.hints.content(engine_hash)?.last())
    }

    /// The block before one of the engine's, from any place that knows it.
    fn known_parent(&self, content: &Content) -> Option<BlockHash> {
        let first = *content.blocks().first()?;
        self.tiers.iter().find_map(|account| account.parent(first))
    }

    /// Tells places what a block is that they named before it was described.
    fn recognise(&mut self, described_in: u32, engine_hash: EngineHash, content: &Content, visible: &mut Vec<Event>) {
        let parent = self.known_parent(content);
        for (tier, account) in Tier::ALL.into_iter().zip(&mut self.tiers) {
            for position in 0..account.groups.len() {
                let group = &account.groups[position];
                // A group with larger blocks holds more behind the same hash than is known here.
                let is_meant = match group.held.get(&engine_hash).map(|held| &held.content) {
                    Some(Content::Unknown(0)) => group.number == described_in,
                    Some(Content::Unknown(units)) => *units == content.blocks().len(),
                    _ => false,
                };
                if !is_meant {
                    continue;
                }
                let taken = account.take(position, engine_hash, content.clone(), false, parent, |block, is_new| {
                    if is_new {
                        visible.push(Event::Stored { tier, parent: None, hashes: vec![block] });
                    }
                });
                self.unrecognised -= u64::from(taken == Taken::Recognised);
            }
        }
    }

    fn remove(&mut self, hashes: &[EngineHash], place: Place, visible: &mut Vec<Event>) {
        let mut gone = Vec::new();
        let mut unknown = 0;
        let account = &mut self.tiers[place.tier.position()];
        let position = account.groups.iter().position(|group| group.number == place.group);
        for engine_hash in hashes {
            if place.is_hint {
                unknown += u64::from(!self.hints.remove(*engine_hash));
                continue;
            }
            match position.and_then(|position| account.give(position, *engine_hash, 1, &mut gone)) {
                Some(was_unrecognised) => self.unrecognised -= u64::from(was_unrecognised),
                None => unknown += 1,
            }
        }
        self.counters.unknown_removals += unknown;
        if !gone.is_empty() {
            for block in &gone {
                self.vouched.remove(block);
            }
            visible.push(Event::Removed { tier: place.tier, hashes: gone });
        }
    }

    /// Takes an engine's hash out of all places, with all its copies.
    fn forget(&mut self, engine_hash: EngineHash, visible: &mut Vec<Event>) {
        for (tier, account) in Tier::ALL.into_iter().zip(&mut self.tiers) {
            let mut gone = Vec::new();
            for position in 0..account.groups.len() {
                let was_unrecognised = account.give(position, engine_hash, u32::MAX, &mut gone);
                self.unrecognised -= u64::from(was_unrecognised == Some(true));
            }
            if !gone.is_empty() {
                visible.push(Event::Removed { tier, hashes: gone });
            }
        }
    }

    fn forget_all(&mut self, visible: &mut Vec<Event>) -> bool {
        let mut held_any = false;
        for account in &mut self.tiers {
            held_any |= account.clear();
        }
        self.hints.clear();
        self.vouched.clear();
        self.unrecognised = 0;
        if held_any {
            visible.push(Event::Cleared { tier: None });
        }
        held_any
    }
}

/// Stored blocks in either form.
struct Run<'a> {
    hashes: &'a [EngineHash],
    parent: Option<EngineHash>,
    tokens: &'a [u32],
    block_size_tokens: usize,
    place: Place,
    root: Option<BlockHash>,
    keys: &'a BlockKeys,
}

impl Run<'_> {
    /// Blocks were left out, as a group does that keeps only a window.
    fn has_gaps(&self) -> bool {
        self.tokens.len() != self.hashes.len().saturating_mul(self.block_size_tokens)
    }
}

fn unknown(contents: &[Content]) -> u64 {
    contents.iter().filter(|content| content.is_unknown()).count() as u64
}

/// Hashes of the blocks of a run. A key taints the block in which it begins, by its name and its place in that block;
/// what follows inherits that through its parent, so it does not matter how large the engine's own blocks are.
fn hash_run(parent: BlockHash, tokens: &[u32], block_size: usize, keys: &[BlockKey]) -> Vec<BlockHash> {
    let mut blocks = Vec::with_capacity(tokens.len() / block_size.max(1));
    let mut keys: Vec<&BlockKey> = keys.iter().collect();
    keys.sort_by_key(|key| key.token);
    let mut parent = parent;
    let mut start = 0;
    for key in keys {
        let block_start = (key.token - key.token % block_size).min(tokens.len());
        BlockHasher::new(parent, block_size).push(&tokens[start..block_start], &mut blocks);
        if block_start > start {
            parent = blocks.last().copied().unwrap_or(parent);
            start = block_start;
        }
        parent = keyed_parent(parent, &key.name, key.token % block_size);
    }
    BlockHasher::new(parent, block_size).push(&tokens[start..], &mut blocks);
    blocks
}

/// What a block follows in which something begins that tokens do not tell apart, an image for example: `name` is what
/// the engine calls it, `offset_tokens` where in the block it begins. Applied once for each, in order.
#[must_use]
pub fn keyed_parent(parent: BlockHash, name: &str, offset_tokens: usize) -> BlockHash {
    Namespace::new("block key", name, &offset_tokens.to_string()).root(HashSeed(parent.0))
}
