"""Which promises the protocol of RocketMQ clients has words for."""

from typing import Final

#: The modules whose promises are made to RocketMQ clients, too.
MODULES: Final = frozenset(
    {
        "test_backoff",
        "test_blocked_groups",
        "test_dead_letter_group",
        "test_delay",
        "test_delayed_delivery",
        "test_exhausted_halves",
        "test_fifo",
        "test_fifo_leases",
        "test_filters",
        "test_leases",
        "test_lite_subscriptions",
        "test_lite_topics",
        "test_open_halves",
        "test_publishing",
        "test_queue_order",
        "test_queue_order_failures",
        "test_queue_order_restart",
        "test_rate_limit",
        "test_recall",
        "test_receiving",
        "test_restart",
        "test_retry",
        "test_sql92",
        "test_topic_types",
        "test_transaction_checks",
        "test_transactions",
    }
)
#: Of these modules, what the protocol says otherwise or has no words for: that a table is taken or
#: refused as a whole, which row is wrong, the queue of what was sent, who is asked about a half
#: message but the producers of its topic, whether it was the first end of a transaction, more than
#: 32 messages of a message group at once, the order of properties; and what would take tens of
#: thousands of calls.
OTHERWISE: Final = frozenset(
    {
        "test_a_blocked_group_with_most_messages_blocks_no_other_group",
        "test_a_commit_for_a_deleted_topic_is_dropped",
        "test_a_commit_of_a_message_that_the_topic_has_is_suppressed_as_a_send_is",
        "test_a_delivered_message_cannot_be_recalled",
        "test_a_filter_of_an_unknown_type_is_refused",
        "test_a_half_message_is_there_after_a_crash_between_it_and_its_end",
        "test_a_limit_out_of_range_is_refused",
        "test_a_message_group_comes_in_the_order_it_was_sent",
        "test_a_message_group_of_a_mixed_topic_is_checked",
        "test_a_message_is_recalled_once",
        "test_a_message_may_be_forwarded_to_the_dead_letters_at_once",
        "test_a_mixed_topic_keeps_each_promise",
        "test_a_name_that_is_no_lite_topic_is_refused",
        "test_a_priority_chooses_the_queue",
        "test_a_priority_topic_may_grow",
        "test_a_producer_group_has_a_name",
        "test_a_producer_that_asks_again_is_there_for_another_60_s",
        "test_a_producer_that_was_silent_for_60_s_is_not_waited_for",
        "test_a_producer_waits_for_checks",
        "test_a_receive_that_names_no_client_or_has_a_filter_is_refused",
        "test_a_subscription_that_makes_no_sense_is_refused",
        "test_a_table_that_contradicts_itself_is_refused",
        "test_a_table_that_is_none_of_handles_is_refused",
        "test_a_topic_takes_messages_of_its_type_and_no_other",
        "test_a_transaction_named_twice_in_a_table_is_ended_once",
        "test_a_transaction_topic_takes_nothing_but_half_messages",
        "test_after_15_checks_it_goes_to_the_topic_of_exhausted_halves",
        "test_an_end_is_taken_as_long_as_the_half_message_is_open",
        "test_an_immunity_out_of_range_is_refused",
        "test_another_producer_group_may_not_end_it",
        "test_any_text_is_hashed_over_its_utf16_units",
        "test_committed_messages_come_rolled_back_ones_never",
        "test_ending_twice_is_answered_the_same_and_delivers_once",
        "test_every_message_gets_an_offset_of_its_own_dense_per_queue",
        "test_everything_about_a_message_is_kept",
        "test_half_messages_lie_in_the_one_queue_of_the_half_topic",
        "test_however_many_are_forwarded_at_once_all_are_there_when_it_returns",
        "test_message_group_goes_to_the_queue_rocketmq_chooses",
        "test_messages_of_one_group_share_a_queue_in_the_order_sent",
        "test_messages_without_a_group_are_spread_evenly",
        "test_one_ended_receipt_refuses_the_whole_acknowledgement",
        "test_one_ended_receipt_refuses_the_whole_change",
        "test_one_receive_takes_up_to_a_hundred_thousand",
        "test_receive_gives_a_queue_in_the_order_of_its_offsets",
        "test_send_answers_row_for_row",
        "test_senders_at_the_same_time_get_different_offsets",
        "test_the_last_failure_sends_the_message_to_the_dead_letters",
        "test_the_view_of_half_messages",
        "test_unknown_is_answered_with_what_was_said_first",
        "test_what_is_no_recall_handle_recalls_nothing",
    }
)
