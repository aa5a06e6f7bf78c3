//! How often a host may call a method that looks after a server. Methods of requests are bounded by admission instead.
//!
//! Python servers keep the same pace (`kvist.grpc.limits`).

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use parking_lot::Mutex;

/// Calls of one method from one host in a second.
const CALLS_PER_SECOND: f64 = 500.0;
/// So many seconds' worth of calls may come in a moment: routers and agents that come back do so together.
const BURST_SECONDS: f64 = 2.0;
/// Buckets that are remembered. One that is full again says what none says.
const MOST_BUCKETS: usize = 4_096;

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

/// The pace of one server.
#[derive(Debug)]
pub(crate) struct Pace {
    per_second: f64,
    buckets: Mutex<HashMap<(&'static str, IpAddr), Bucket>>,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(CALLS_PER_SECOND)
    }
}

impl Pace {
    pub(crate) fn new(per_second: f64) -> Self {
        Self { per_second, buckets: Mutex::default() }
    }

    /// Takes a call.
    ///
    /// # Errors
    /// `OVERLOADED`, with the time to wait, when the host has called the method too often.
    pub(crate) fn take(&self, method: &'static str, host: IpAddr, now: Instant) -> Result<(), KvistError> {
        let most = (self.per_second * BURST_SECONDS).max(1.0);
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MOST_BUCKETS && !buckets.contains_key(&(method, host)) {
            self.forget(&mut buckets, now, most);
        }
        let bucket = buckets.entry((method, host)).or_insert(Bucket { tokens: most, filled_at: now });
        bucket.tokens = self.tokens(bucket, now, most);
        bucket.filled_at = now;
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let wait = Duration::from_secs_f64((1.0 - bucket.tokens) / self.per_second);
        let message = format!("more than {} calls of {method} a second come from this host", self.per_second);
        Err(KvistError::new(Code::Overloaded, message).with_retry_after(wait))
    }

    fn tokens(&self, bucket: &Bucket, now: Instant, most: f64) -> f64 {
        let since = now.saturating_duration_since(bucket.filled_at).as_secs_f64();
        (bucket.tokens + since * self.per_second).min(most)
    }

    /// Makes room: for one at least, whoever is the longest silent.
    fn forget(&self, buckets: &mut HashMap<(&'static str, IpAddr), Bucket>, now: Instant, most: f64) {
        buckets.retain(|_, bucket| self.tokens(bucket, now, most) < most);
        if buckets.len() >= MOST_BUCKETS
            && let Some(oldest) = buckets.iter().min_by_key(|(_, bucket)| bucket.filled_at).map(|(key, _)| *key)
        {
            buckets.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn host(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(number).into()
    }

    #[test]
    fn a_host_that_calls_too_often_waits_and_the_others_do_not() {
        let (pace, start) = (Pace::new(10.0), Instant::now());
        let taken = |method, number, now| pace.take(method, host(number), now).map_err(|refusal| refusal.retry_after);
        for _ in 0..20 {
            assert_eq!(Ok(()), taken("Explain", 1, start));
        }
        assert_eq!(Err(Some(Duration::from_millis(100))), taken("Explain", 1, start));
        assert_eq!(Ok(()), taken("Explain", 2, start));
        assert_eq!(Ok(()), taken("ListTargets", 1, start));
        // One more each tenth of a second, and no more than twenty after whatever time.
        let later = start + Duration::from_millis(101);
        assert!(taken("Explain", 1, later).is_ok());
        assert!(taken("Explain", 1, later).is_err());
        let much_later = start + Duration::from_secs(3_600);
        assert_eq!(20, (0..30).filter(|_| taken("Explain", 1, much_later).is_ok()).count());
    }

    #[test]
    fn the_memory_of_hosts_is_bounded_and_those_that_wait_stay_in_it() {
        let (pace, start) = (Pace::new(1.0), Instant::now());
        let most = u32::try_from(MOST_BUCKETS).unwrap();
        for number in 0..2 * most {
            // Each of them has one call left, and the first one none.
            pace.take("Explain", host(0), start + Duration::from_micros(number.into())).ok();
            assert!(pace.take("Explain", host(number + 1), start + Duration::from_micros(number.into())).is_ok());
        }
        assert_eq!(MOST_BUCKETS, pace.buckets.lock().len());
        assert!(pace.take("Explain", host(0), start + Duration::from_millis(10)).is_err());
        // A second later all are full again.
        assert!(pace.take("Explain", host(9 * most), start + Duration::from_secs(10)).is_ok());
        assert_eq!(1, pace.buckets.lock().len());
    }
}
