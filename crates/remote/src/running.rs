//! Requests that run, for an orderly end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kvist_errors::{Code, KvistError};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Counts requests and can refuse new ones.
#[derive(Debug)]
pub(crate) struct Running {
    count: watch::Sender<usize>,
    gauge: Gauge,
    is_draining: AtomicBool,
    /// Ends those that run.
    pub(crate) stopped: CancellationToken,
}

/// One request; it has ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Running>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.send_modify(|count| *count -= 1);
        self.0.gauge.dec();
    }
}

impl Running {
    pub(crate) fn new(gauge: Gauge) -> Arc<Self> {
        Arc::new(Self {
            count: watch::Sender::new(0),
            gauge,
            is_draining: AtomicBool::new(false),
            stopped: CancellationToken::new(),
        })
    }

    /// Counts one more.
    ///
    /// # Errors
    /// Nothing new is taken.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<Counted, KvistError> {
        if self.is_draining() {
            return Err(draining());
        }
        self.count.send_modify(|count| *count += 1);
        self.gauge.inc();
        Ok(Counted(Arc::clone(self)))
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Refuses what is new from here on.
    pub(crate) fn begin_draining(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    /// Waits for what runs. True when nothing runs any more.
    pub(crate) async fn ended(&self, time_limit: Duration) -> bool {
        let mut count = self.count.subscribe();
        tokio::time::timeout(time_limit, count.wait_for(|count| *count == 0)).await.is_ok_and(|ended| ended.is_ok())
    }

    pub(crate) fn stop(&self) {
        self.begin_draining();
        self.stopped.cancel();
    }
}

pub(crate) fn draining() -> KvistError {
    KvistError::new(Code::Draining, "the edge is being stopped").before_start()
}
