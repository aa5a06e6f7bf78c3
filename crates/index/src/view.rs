//! What readers know: the memory there is, and who is a source. Replaced as a whole when one of its parts is another.

use std::sync::Arc;

use parking_lot::RwLock;

use crate::{arena::Lines, sources::SourceList, table::Directory};

/// One state of the parts. What the parts hold goes on changing.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) records: Arc<Lines>,
    pub(crate) words: Arc<Lines>,
    pub(crate) pages: Arc<Lines>,
    pub(crate) directory: Arc<Directory>,
    pub(crate) sources: Arc<SourceList>,
}

/// The newest view, twice: the writer replaces one after the other, so that a reader always gets one of them at once,
/// even if the writer is stopped in the middle.
#[derive(Debug)]
pub(crate) struct Published {
    copies: [RwLock<Arc<View>>; 2],
}

impl Published {
    pub(crate) fn new(view: View) -> Self {
        let view = Arc::new(view);
        Self { copies: [RwLock::new(Arc::clone(&view)), RwLock::new(view)] }
    }

    pub(crate) fn get(&self) -> Arc<View> {
        loop {
            // The writer holds one at a time: who meets it twice has seen it go on.
            for copy in &self.copies {
                if let Some(view) = copy.try_read() {
                    return Arc::clone(&view);
                }
            }
        }
    }

    /// Whether a view is still one of them. The memory of a number may be another in the next one, and the writer uses it only
    /// once both are replaced: so what was read by a view that still is one was read where it lies. Waits for nobody.
    pub(crate) fn is_current(&self, view: &Arc<View>) -> bool {
        self.copies.iter().any(|copy| copy.try_read().is_some_and(|now| Arc::ptr_eq(&now, view)))
    }

    /// Replaces both; there is one writer.
    pub(crate) fn set(&self, view: View) {
        let view = Arc::new(view);
        for copy in &self.copies {
            let old = std::mem::replace(&mut *copy.write(), Arc::clone(&view));
            drop(old);
        }
    }
}
