//! What tests do to an index that no caller can.

use kvist_blocks::{BlockHash, Event, SourceKey, Tier};

use crate::{Index, core::Core, node};

impl Index {
    /// Takes a block out of the contents alone, as a mistake of this crate would.
    pub(crate) fn lose_silently(&self, key: &SourceKey, hash: BlockHash) {
        let core = &mut self.write().core;
        let Some(slot) = core.sources.get(key).map(|source| source.slot) else { return };
        let Some(seat) = core.place_of(slot, hash) else { return };
        core.take_out(seat.node, slot, Tier::Device, 1 << seat.offset);
    }

    /// Keeps the writer's lock and leaves a source and a node in the middle of a change while something runs, as a writer
    /// does that has lost its core.
    pub(crate) fn while_stopped<T>(
        &self,
        key: Option<&SourceKey>,
        hash: Option<BlockHash>,
        run: impl FnOnce() -> T,
    ) -> T {
        let inner = &mut *self.write();
        let core = &mut inner.core;
        let position = key.and_then(|key| core.sources.position(key));
        if let Some(position) = position {
            core.sources.begin(position, core.versions.newest());
        }
        let slots = 0..core.slots.len() as u32;
        let node =
            hash.and_then(|hash| slots.into_iter().find_map(|slot| core.place_of(slot, hash))).map(|seat| seat.node);
        if let Some(record) = node.and_then(|node| core.record(node)) {
            node::begin_change(record);
        }
        let result = run();
        if let Some(node) = node {
            core.change(node, |_, _| {});
        }
        if let Some(position) = position {
            core.end(position);
        }
        result
    }

    /// Applies the next batch of a source, and runs something when all of it is applied and nothing of that is said yet.
    pub(crate) fn while_applying<T>(&self, key: &SourceKey, events: &[Event], run: impl FnOnce() -> T) -> T {
        let core = &mut self.write().core;
        let position = core.sources.position(key).unwrap();
        core.sources.begin(position, core.versions.newest());
        let source = core.sources.at(Some(position)).unwrap();
        source.next_sequence += 1;
        let slot = source.slot;
        core.apply_events(key, slot, events);
        let result = run();
        core.end(position);
        result
    }

    /// Looks at what the writer keeps.
    pub(crate) fn with_core<T>(&self, look: impl FnOnce(&mut Core) -> T) -> T {
        look(&mut self.write().core)
    }

    /// Nodes that the writer has looked at so far.
    pub(crate) fn visits(&self) -> u64 {
        self.write().core.visits
    }
}
