//! Both ends of Connect against each other, over loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, unreachable_pub, missing_docs)]

mod support;

use std::time::{Duration, Instant};

use kvist_errors::Code;
use kvist_link::{LinkSettings, LinkState, RequestEvent, RequestStream, WakeBatch};
use kvist_proto::{engine::v1::*, events::v1::LoadReport};
use support::*;

async fn next(stream: &mut RequestStream) -> RequestEvent {
    tokio::time::timeout(PATIENCE, stream.next()).await.expect("no event in time").expect("the stream has ended")
}

/// Reads to the end; tokens and the terminal event.
async fn read(stream: &mut RequestStream) -> (Vec<u32>, RequestEvent) {
    let mut tokens = Vec::new();
    loop {
        match next(stream).await {
            RequestEvent::Delta(delta) => tokens.extend(delta.token_ids),
            terminal => {
                assert!(stream.next().await.is_none(), "nothing follows the end");
                return (tokens, terminal);
            }
        }
    }
}

fn finished(reason: FinishReason) -> Finished {
    Finished { reason: reason.into(), ..Finished::default() }
}

fn failed_code(event: &RequestEvent) -> Code {
    match event {
        RequestEvent::Failed(error) => error.code,
        other => panic!("expected a failure, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_share_one_stream_and_keep_their_own_order() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    assert_eq!("w", link.description().unwrap().worker_uid);
    let mut streams: Vec<_> = (0..50).map(|id| link.start(request(&format!("r-{id}"), 10 + id))).collect();
    let mut outputs = Vec::new();
    for id in 0..50 {
        outputs.push(worker.script.output(&format!("r-{id}")).await);
    }
    for step in 0..20u32 {
        let _batch = WakeBatch::begin();
        for (id, output) in (0u32..).zip(&outputs) {
            output.delta(delta(&[id * 1000 + step]));
        }
    }
    for output in outputs {
        output.finished(finished(FinishReason::Length));
    }
    for (id, stream) in (0u32..).zip(&mut streams) {
        let (tokens, end) = read(stream).await;
        assert_eq!((0..20).map(|step| id * 1000 + step).collect::<Vec<_>>(), tokens);
        assert_eq!(RequestEvent::Finished(finished(FinishReason::Length)), end);
    }
}

#[tokio::test]
async fn an_abort_overtakes_requests_that_wait() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut first = link.start(request("first", 1));
    let output = worker.script.output("first").await;
    // Nothing is written between these calls: this test has one thread.
    let waiting: Vec<_> = (0..30).map(|id| link.start(request(&format!("big-{id}"), 11_000))).collect();
    first.abort(AbortReason::StopString);
    assert_eq!(AbortReason::StopString, worker.script.aborted("first").await);
    output.finished(finished(FinishReason::Stop));
    assert_eq!((vec![], RequestEvent::Finished(finished(FinishReason::Stop))), read(&mut first).await);
    worker.script.output("big-29").await;
    let arrivals = worker.script.arrivals.lock().clone();
    assert_eq!(["+first", "-first", "+big-0"], arrivals[..3]);
    drop(waiting);
}

#[tokio::test]
async fn a_request_that_is_given_up_before_it_was_written_never_reaches_the_worker() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut given_up = link.start(request("never", 1));
    given_up.abort(AbortReason::Deadline);
    let (_, end) = read(&mut given_up).await;
    assert!(matches!(end, RequestEvent::Failed(error) if error.code == Code::DeadlineExceeded && error.not_started));
    drop(link.start(request("neither", 1)));
    let _kept = link.start(request("one", 1));
    worker.script.output("one").await;
    assert_eq!(vec!["+one"], *worker.script.arrivals.lock());
}

#[tokio::test]
async fn dropping_a_stream_aborts_its_request() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    output.delta(delta(&[1]));
    drop(stream);
    assert_eq!(AbortReason::Cancelled, worker.script.aborted("a").await);
}

#[tokio::test]
async fn a_large_prompt_goes_ahead_and_arrives_whole() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut stream = link.start(request("large", 450_000));
    let output = worker.script.output("large").await;
    let prompt = worker.script.requests.lock()["large"].0.prompt.clone();
    assert_eq!(request("large", 450_000).prompt, prompt);
    output.finished(finished(FinishReason::Length));
    read(&mut stream).await;
}

#[tokio::test]
async fn many_tokens_at_once_are_cut_into_frames() {
    let worker = Worker::start().await;
    let settings = LinkSettings { request_buffer_tokens: 1_000_000, ..settings() };
    let link = link(worker.address, settings).await;
    let mut stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    let tokens: Vec<u32> = (0..100_000).map(|token| token * 17).collect();
    output.delta(TokenDelta { cached_tokens: Some(5), ..delta(&tokens) });
    let logprobs = vec![TokenLogprobs { logprob: -1.0, top: vec![TopLogprob { token_id: 1, logprob: -1.0 }; 20] }; 300];
    output.delta(TokenDelta { logprobs, ..delta(&[9; 300]) });
    output.finished(finished(FinishReason::Length));
    let mut got: (Vec<u32>, usize, Vec<u32>) = Default::default();
    while let RequestEvent::Delta(delta) = next(&mut stream).await {
        got.0.extend(delta.token_ids);
        got.1 += delta.logprobs.len();
        got.2.extend(delta.cached_tokens);
    }
    let expected: Vec<u32> = tokens.into_iter().chain([9; 300]).collect();
    assert_eq!((expected, 300, vec![5]), got);
}

#[tokio::test]
async fn loss_of_the_stream_ends_its_requests_at_both_ends_and_the_link_comes_back() {
    let worker = Worker::start().await;
    let proxy = Proxy::start(worker.address).await;
    let link = link(proxy.address, settings()).await;
    let mut stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    output.delta(delta(&[1, 2]));
    assert_eq!(RequestEvent::Delta(delta(&[1, 2])), next(&mut stream).await);
    let mut states = link.watch_state();
    states.mark_unchanged();
    proxy.cut();
    let (_, end) = read(&mut stream).await;
    assert!(matches!(&end, RequestEvent::Failed(error) if error.code == Code::EngineLost && !error.not_started));
    assert_eq!(AbortReason::Cancelled, worker.script.aborted("a").await);
    // What the engine still says goes nowhere and hurts nobody.
    output.delta(delta(&[3]));
    output.finished(finished(FinishReason::Aborted));
    tokio::time::timeout(PATIENCE, states.changed()).await.unwrap().unwrap();
    until(&link, LinkState::Connected).await;
    let mut again = link.start(request("a", 1));
    worker.script.output("a").await.finished(finished(FinishReason::Length));
    assert_eq!((vec![], RequestEvent::Finished(finished(FinishReason::Length))), read(&mut again).await);
}

#[tokio::test]
async fn a_request_over_a_lost_link_fails_at_once_and_was_not_started() {
    let worker = Worker::start().await;
    let (address, proxy) = (worker.address, Proxy::start(worker.address).await);
    let link = link(proxy.address, settings()).await;
    drop(worker);
    proxy.cut();
    until(&link, LinkState::Lost).await;
    let (_, end) = read(&mut link.start(request("a", 1))).await;
    assert!(matches!(end, RequestEvent::Failed(error) if error.code == Code::EngineUnavailable && error.not_started));
    assert!(link.last_error().is_some());
    let worker = Worker::start_at(address).await;
    until(&link, LinkState::Connected).await;
    assert!(link.last_error().is_none());
    drop(worker);
}

#[tokio::test]
async fn a_slow_client_loses_its_own_request_only() {
    let worker = Worker::start().await;
    let link = link(worker.address, LinkSettings { request_buffer_tokens: 100, ..settings() }).await;
    let (mut slow, mut quick) = (link.start(request("slow", 1)), link.start(request("quick", 1)));
    let (slow_output, quick_output) = (worker.script.output("slow").await, worker.script.output("quick").await);
    slow_output.delta(delta(&[7; 60]));
    slow_output.delta(delta(&[7; 60]));
    assert_eq!(AbortReason::SlowClient, worker.script.aborted("slow").await);
    slow_output.finished(finished(FinishReason::Aborted));
    for token in 0..500 {
        quick_output.delta(delta(&[token]));
        assert_eq!(RequestEvent::Delta(delta(&[token])), next(&mut quick).await);
    }
    quick_output.finished(finished(FinishReason::Length));
    assert_eq!(RequestEvent::Finished(finished(FinishReason::Length)), read(&mut quick).await.1);
    assert_eq!(Code::SlowClient, failed_code(&read(&mut slow).await.1));
}

#[tokio::test]
async fn an_output_that_is_dropped_has_failed() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut stream = link.start(request("a", 1));
    drop(worker.script.output("a").await);
    assert_eq!(Code::EngineFailed, failed_code(&read(&mut stream).await.1));
}

#[tokio::test]
async fn load_travels_on_the_same_stream() {
    let worker = Worker::start().await;
    let report = |number| LoadReport { report_number: number, running_requests: 3, ..LoadReport::default() };
    *worker.script.loads.lock() = vec![report(1), LoadReport { rank: 1, ..report(1) }];
    let link = link(worker.address, settings()).await;
    let heard = async |number| {
        let started = Instant::now();
        while link.load(1).is_none_or(|load| load.report.report_number < number) {
            assert!(started.elapsed() < PATIENCE);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        started.elapsed()
    };
    heard(1).await;
    assert_eq!(3, link.load(0).unwrap().report.running_requests);
    assert!(link.load(2).is_none());
    worker.script.loads.lock()[1].report_number = 2;
    worker.server.load_changed(true);
    heard(2).await;
    worker.script.loads.lock()[1].report_number = 3;
    worker.server.load_changed(false);
    heard(3).await;
    // Without a change, after the interval.
    worker.script.loads.lock()[1].report_number = 4;
    assert!(heard(4).await > Duration::from_millis(300));
}

#[tokio::test]
async fn a_newer_stream_of_a_router_replaces_the_older() {
    let worker = Worker::start().await;
    let first = link(worker.address, settings()).await;
    let mut stream = first.start(request("a", 1));
    let output = worker.script.output("a").await;
    output.delta(delta(&[1]));
    let second = link(worker.address, settings()).await;
    assert_eq!(Code::EngineLost, failed_code(&read(&mut stream).await.1));
    assert_eq!(AbortReason::Cancelled, worker.script.aborted("a").await);
    first.close();
    let mut stream = second.start(request("b", 1));
    worker.script.output("b").await.finished(finished(FinishReason::Length));
    read(&mut stream).await;
}

#[tokio::test]
async fn an_older_session_is_refused() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let hello = Hello { router_name: "r".to_owned(), session: 1, load_interval: None };
    let message = RouterMessage { message: Some(router_message::Message::Hello(hello)) };
    let frames = tokio_stream::once(ConnectRequest { messages: vec![message] });
    let status = link.client().connect(frames).await.unwrap_err();
    assert_eq!(Code::Conflict, kvist_errors::from_status(&status).code);
    let status = link.client().connect(tokio_stream::once(ConnectRequest::default())).await.unwrap_err();
    assert_eq!(Code::InvalidArgument, kvist_errors::from_status(&status).code);
    assert_eq!(LinkState::Connected, link.state());
}

#[tokio::test]
async fn draining_is_announced_and_closing_ends_streams_with_an_error() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    output.delta(delta(&[1]));
    worker.server.announce_draining();
    next(&mut stream).await;
    let started = Instant::now();
    while !link.is_draining() {
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker.server.close();
    assert_eq!(Code::EngineLost, failed_code(&read(&mut stream).await.1));
}

#[tokio::test]
async fn what_was_said_before_the_end_of_the_stream_still_arrives() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    // One thread: nothing is written between these calls.
    output.delta(delta(&[1, 2]));
    output.finished(finished(FinishReason::Length));
    worker.server.close();
    let (tokens, end) = read(&mut stream).await;
    assert_eq!(vec![1, 2], tokens);
    assert!(matches!(end, RequestEvent::Finished(_)), "{end:?}");
}

#[tokio::test]
async fn large_results_and_the_tokenizer_come_beside_the_stream() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let result: Vec<_> = (0..5000u16).map(|at| TokenLogprobs { logprob: -f32::from(at), top: vec![] }).collect();
    worker.server.put_result("a", result.clone()).unwrap();
    assert_eq!(result, link.fetch_result("a").await.unwrap());
    assert_eq!(Code::NotFound, link.fetch_result("a").await.unwrap_err().code);
    let (header, file) = link.fetch_tokenizer("").await.unwrap();
    assert_eq!(("d", vec![1, 2, 3]), (header.digest.as_str(), file));
}

#[tokio::test]
async fn a_link_ends_with_its_last_user() {
    let worker = Worker::start().await;
    let link = link(worker.address, settings()).await;
    let mut stream = link.start(request("a", 1));
    let output = worker.script.output("a").await;
    drop(link);
    // The request keeps the link.
    output.finished(finished(FinishReason::Length));
    assert_eq!(RequestEvent::Finished(finished(FinishReason::Length)), read(&mut stream).await.1);
    drop(stream);
    let started = Instant::now();
    while worker.server.connected_routers() > 0 {
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
