//! Which upstream gets a request.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_blocks::Rank;
use kvist_errors::{Code, KvistError};
use kvist_schedule::{BreakerBook, BreakerSettings, Report, TargetId};
use parking_lot::Mutex;

use crate::client::Upstream;

/// The upstreams of one model, in the order of the settings.
#[derive(Debug)]
pub(crate) struct Fleet {
    members: Vec<Member>,
    book: Mutex<BreakerBook>,
    started: Instant,
}

/// One of them.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) upstream: Arc<Upstream>,
    /// What it calls the model.
    pub(crate) model: String,
    target: TargetId,
}

impl Fleet {
    pub(crate) fn new(members: impl IntoIterator<Item = (Arc<Upstream>, String)>) -> Self {
        let members: Vec<Member> = members
            .into_iter()
            .map(|(upstream, model)| {
                let target = TargetId { worker: upstream.name.as_str().into(), rank: Rank(0) };
                Member { upstream, model, target }
            })
            .collect();
        let mut book = BreakerBook::new(BreakerSettings::default());
        book.set_fleet(Duration::ZERO, members.iter().map(|member| (&member.target, true)));
        Self { members, book: Mutex::new(book), started: Instant::now() }
    }

    /// The first that may be asked. What runs elsewhere does not count: how much an outside server takes is its own
    /// business.
    ///
    /// # Errors
    /// `OVERLOADED`: all of them rest.
    pub(crate) fn choose(&self) -> Result<&Member, KvistError> {
        let now = self.started.elapsed();
        let mut book = self.book.lock();
        let free = self.members.iter().find(|member| !book.is_broken(now, &member.target));
        let Some(member) = free else {
            let message = "every provider of this model has asked for a pause";
            return Err(KvistError::new(Code::Overloaded, message)
                .with_retry_after(Duration::from_secs(1))
                .before_start());
        };
        book.sent(now, &member.target);
        Ok(member)
    }

    /// Takes what came of a request.
    pub(crate) fn report(&self, member: &Member, report: Report) {
        self.book.lock().report(self.started.elapsed(), &member.target, report);
    }
}
