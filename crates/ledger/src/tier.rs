//! What one tier holds, by cache group and engine hash.

use hashbrown::{HashMap, hash_map::Entry};
use kvist_blocks::{BlockHash, Digest};

use crate::EngineHash;

/// What Kvist calls the content of one of the engine's blocks: one block, several where the engine's are larger, or
/// nothing where the content is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// With the number of blocks it stands for; 0 when that is not known either.
    Unknown(usize),
    One(BlockHash),
    Several(Box<[BlockHash]>),
}

impl Content {
    pub(crate) fn from_blocks(blocks: &[BlockHash]) -> Self {
        match blocks {
            [] => Self::Unknown(0),
            [block] => Self::One(*block),
            several => Self::Several(several.into()),
        }
    }

    pub(crate) fn blocks(&self) -> &[BlockHash] {
        match self {
            Self::Unknown(_) => &[],
            Self::One(block) => std::slice::from_ref(block),
            Self::Several(blocks) => blocks,
        }
    }

    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }

    pub(crate) fn last(&self) -> Option<BlockHash> {
        self.blocks().last().copied()
    }
}

/// One of the engine's blocks, and how many times it is there.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) content: Content,
    pub(crate) copies: u32,
}

/// One cache group in one tier.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) number: u32,
    pub(crate) held: HashMap<EngineHash, Held>,
    /// Over all engine hashes; several may stand for one block.
    copies: HashMap<BlockHash, Copies>,
}

/// How many times one of Kvist's blocks is there.
#[derive(Debug, Default)]
struct Copies {
    count: u32,
    /// The block before it; none when it starts a prompt, or nobody knows.
    parent: Option<BlockHash>,
}

/// One tier. A block counts as held when every group that uses the tier holds it: a hit ends at the shortest group.
#[derive(Debug, Default)]
pub(crate) struct TierAccount {
    pub(crate) groups: Vec<Group>,
    pub(crate) digest: Digest,
    pub(crate) block_count: u64,
    pub(crate) is_used: bool,
}

/// What became of a stored block.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is there.
    Held,
    /// It is there, and until now its content was not known.
    Recognised,
    /// It is there for the first time, and its content is not known.
    Unrecognised,
    /// The engine's hash stands for another content.
    Conflict,
}

impl TierAccount {
    /// Where a group is in `groups`, and how many blocks are no longer held since nobody knew of it.
    pub(crate) fn group(&mut self, number: u32) -> (usize, u64) {
        if let Some(position) = self.groups.iter().position(|group| group.number == number) {
            return (position, 0);
        }
        let group = Group { number, held: HashMap::new(), copies: HashMap::new() };
        self.groups.push(group);
        self.digest = Digest::default();
        (self.groups.len() - 1, std::mem::take(&mut self.block_count))
    }

    pub(crate) fn contains(&self, block: BlockHash) -> bool {
        !self.groups.is_empty() && self.groups.iter().all(|group| group.copies.contains_key(&block))
    }

    /// All blocks, each with the block before it as far as a group knows it.
    pub(crate) fn blocks(&self) -> Vec<(BlockHash, Option<BlockHash>)> {
        let Some(smallest) = self.groups.iter().min_by_key(|group| group.copies.len()) else { return Vec::new() };
        let held = smallest.copies.keys().copied().filter(|block| self.contains(*block));
        held.map(|block| (block, self.parent(block))).collect()
    }

    /// The block before one, as far as a group knows it.
    pub(crate) fn parent(&self, block: BlockHash) -> Option<BlockHash> {
        self.groups.iter().find_map(|group| group.copies.get(&block)?.parent)
    }

    /// Takes a block in. `parent` is the block before it, if that is known. `changed` is told, in order, of each of Kvist's blocks and whether it is held from here on.
    pub(crate) fn take(
        &mut self,
        group: usize,
        engine_hash: EngineHash,
        content: Content,
        adds_copy: bool,
        parent: Option<BlockHash>,
        mut changed: impl FnMut(BlockHash, bool),
    ) -> Taken {
        let mut added = 1;
        let mut taken = Taken::Held;
        let blocks = match self.groups[group].held.entry(engine_hash) {
            Entry::Occupied(mut entry) => {
                let held = entry.get_mut();
                let is_news = held.content.is_unknown() && !content.is_unknown();
                if !is_news && !content.is_unknown() && held.content != content {
                    return Taken::Conflict;
                }
                added = u32::from(adds_copy);
                held.copies = held.copies.saturating_add(added);
                if is_news {
                    taken = Taken::Recognised;
                    added = held.copies;
                    held.content = content;
                }
                held.content.clone()
            }
            Entry::Vacant(entry) => {
                if content.is_unknown() {
                    taken = Taken::Unrecognised;
                }
                entry.insert(Held { content, copies: 1 }).content.clone()
            }
        };
        self.is_used = true;
        let mut parent = parent;
        for block in blocks.blocks() {
            let copies = self.groups[group].copies.entry(*block).or_default();
            let was_absent = copies.count == 0;
            copies.count = copies.count.saturating_add(added);
            copies.parent = copies.parent.or(parent);
            parent = Some(*block);
            if copies.count == 0 {
                self.groups[group].copies.remove(block);
                continue;
            }
            let is_new = was_absent && self.contains(*block);
            if is_new {
                self.digest.add(*block);
                self.block_count += 1;
            }
            changed(*block, is_new);
        }
        taken
    }

    /// Takes copies of a block out: the blocks that are gone are added to `gone`. None when it was not held, else
    /// whether its content was not known and the last copy is gone.
    pub(crate) fn give(
        &mut self,
        group: usize,
        engine_hash: EngineHash,
        copies: u32,
        gone: &mut Vec<BlockHash>,
    ) -> Option<bool> {
        let Entry::Occupied(mut entry) = self.groups[group].held.entry(engine_hash) else { return None };
        let copies = copies.min(entry.get().copies);
        entry.get_mut().copies -= copies;
        let is_last = entry.get().copies == 0;
        let content = if is_last { entry.remove().content } else { entry.get().content.clone() };
        for block in content.blocks() {
            let is_held = self.contains(*block);
            let Entry::Occupied(mut entry) = self.groups[group].copies.entry(*block) else { continue };
            entry.get_mut().count = entry.get().count.saturating_sub(copies);
            if entry.get().count > 0 {
                continue;
            }
            entry.remove();
            if is_held {
                self.digest.remove(*block);
                self.block_count -= 1;
                gone.push(*block);
            }
        }
        Some(is_last && content.is_unknown())
    }

    /// Forgets everything but that the groups exist; true when a block was held.
    pub(crate) fn clear(&mut self) -> bool {
        for group in &mut self.groups {
            group.held.clear();
            group.copies.clear();
        }
        self.digest = Digest::default();
        std::mem::take(&mut self.block_count) > 0
    }
}
