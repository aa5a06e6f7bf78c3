//! The sources that hold one block.

use kvist_blocks::Tier;

/// A source's slot and the tiers in which it holds a block: four bits of tiers, the slot above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder(u32);

impl Holder {
    fn new(slot: u32, tier: Tier) -> Self {
        Self(slot << 4 | 1 << tier.position())
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 >> 4
    }

    pub(crate) fn has(self, tier: Tier) -> bool {
        self.0 & (1 << tier.position()) != 0
    }
}

/// Holders of one block. Most blocks have one holder, which costs no allocation.
#[derive(Debug)]
pub(crate) enum Holders {
    One(Holder),
    #[expect(clippy::box_collection, reason = "one pointer instead of three words keeps an entry of the map small")]
    Many(Box<Vec<Holder>>),
}

impl Holders {
    pub(crate) fn new(slot: u32, tier: Tier) -> Self {
        Self::One(Holder::new(slot, tier))
    }

    pub(crate) fn as_slice(&self) -> &[Holder] {
        match self {
            Self::One(holder) => std::slice::from_ref(holder),
            Self::Many(holders) => holders,
        }
    }

    /// Takes a tier of a source in; false when it was in.
    pub(crate) fn add(&mut self, slot: u32, tier: Tier) -> bool {
        let new = Holder::new(slot, tier);
        let present = match self {
            Self::One(holder) => Some(holder).filter(|holder| holder.slot() == slot),
            Self::Many(holders) => holders.iter_mut().find(|holder| holder.slot() == slot),
        };
        if let Some(holder) = present {
            let was_in = holder.has(tier);
            holder.0 |= new.0;
            return !was_in;
        }
        match self {
            Self::One(first) => *self = Self::Many(Box::new(vec![*first, new])),
            Self::Many(holders) => holders.push(new),
        }
        true
    }

    /// Takes a tier of a source out; false when it was not in.
    pub(crate) fn remove(&mut self, slot: u32, tier: Tier) -> bool {
        let mask = 1 << tier.position();
        let clear = |holder: &mut Holder| {
            let was_in = holder.slot() == slot && holder.has(tier);
            if was_in {
                holder.0 &= !mask;
            }
            was_in
        };
        match self {
            Self::One(holder) => clear(holder),
            Self::Many(holders) => {
                let was_in = holders.iter_mut().any(clear);
                self.retain(|_| true);
                was_in
            }
        }
    }

    /// Drops holders without a tier and those that `keep` refuses; true when none is left.
    pub(crate) fn retain(&mut self, keep: impl Fn(u32) -> bool) -> bool {
        let stays = |holder: &Holder| holder.0 & 0xF != 0 && keep(holder.slot());
        match self {
            Self::One(holder) => !stays(holder),
            Self::Many(holders) => {
                holders.retain(stays);
                match holders.as_slice() {
                    [] => true,
                    [only] => {
                        *self = Self::One(*only);
                        false
                    }
                    _ => false,
                }
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.as_slice().iter().all(|holder| holder.0 & 0xF == 0)
    }
}
