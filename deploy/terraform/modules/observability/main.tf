# Logs of every role, alarms for what a person should know, and a budget.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

resource "aws_cloudwatch_log_group" "role" {
  #checkov:skip=CKV_AWS_338:logs of a training run are read within days; log_retention_days decides
  for_each = var.roles

  name              = "${var.parameters}/${each.key}"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_cloudwatch_log_group" "flow" {
  #checkov:skip=CKV_AWS_338:as above
  count = var.flow_logs ? 1 : 0

  name              = "${var.parameters}/flow"
  retention_in_days = var.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

data "aws_iam_policy_document" "flow_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

data "aws_iam_policy_document" "flow" {
  count = var.flow_logs ? 1 : 0

  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = [aws_cloudwatch_log_group.flow[0].arn, "${aws_cloudwatch_log_group.flow[0].arn}:*"]
  }
}

resource "aws_iam_role" "flow" {
  count = var.flow_logs ? 1 : 0

  name               = "${var.name}-flow-logs"
  description        = "Writes the VPC's flow logs"
  assume_role_policy = data.aws_iam_policy_document.flow_assume.json
  tags               = var.tags
}

resource "aws_iam_role_policy" "flow" {
  count = var.flow_logs ? 1 : 0

  name   = "write"
  role   = aws_iam_role.flow[0].id
  policy = data.aws_iam_policy_document.flow[0].json
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = var.kms_key_arn
  tags              = var.tags
}

data "aws_iam_policy_document" "alarms" {
  statement {
    sid       = "AlarmsAndBudget"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms.arn]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

resource "aws_sns_topic_policy" "alarms" {
  arn    = aws_sns_topic.alarms.arn
  policy = data.aws_iam_policy_document.alarms.json
}

resource "aws_sns_topic_subscription" "email" {
  count = var.alarm_email == "" ? 0 : 1

  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = var.alarm_email
}

# The learner publishes its counters every minute.
resource "aws_cloudwatch_metric_alarm" "learner_silent" {
  alarm_name          = "${var.name}-learner-silent"
  alarm_description   = "No progress was reported for 15 minutes: is the run complete (then its machines are gone), or the learner?"
  namespace           = "Troupe"
  metric_name         = "Updates"
  dimensions          = { Run = var.run }
  statistic           = "SampleCount"
  period              = 300
  evaluation_periods  = 3
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  treat_missing_data  = "breaching"
  actions_enabled     = var.running
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "learner_stuck" {
  alarm_name          = "${var.name}-learner-stuck"
  alarm_description   = "The learner reports, and makes no updates: do actors and replay run?"
  evaluation_periods  = 6
  comparison_operator = "LessThanOrEqualToThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching" # the alarm above is about silence
  actions_enabled     = var.running
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  tags                = var.tags

  metric_query {
    id          = "growth"
    label       = "updates in five minutes"
    expression  = "DIFF(updates)"
    return_data = true
  }

  metric_query {
    id = "updates"

    metric {
      namespace   = "Troupe"
      metric_name = "Updates"
      dimensions  = { Run = var.run }
      stat        = "Maximum"
      period      = 300
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "unhealthy" {
  for_each = var.groups

  alarm_name          = "${var.name}-${each.key}-unhealthy"
  alarm_description   = "A machine of ${each.value} fails its status checks for 10 minutes."
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed"
  dimensions          = { AutoScalingGroupName = each.value }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 2
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.alarms.arn]
  tags                = var.tags
}

# A group cannot have what it wants: no spot capacity of these types in these zones, or a quota. It keeps trying.
resource "aws_cloudwatch_metric_alarm" "missing" {
  for_each = var.groups

  alarm_name          = "${var.name}-${each.key}-missing"
  alarm_description   = "For 15 minutes ${each.value} has had fewer machines than it should: no (spot) capacity, or a quota; its activity history says which."
  evaluation_periods  = 3
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  actions_enabled     = var.running
  alarm_actions       = [aws_sns_topic.alarms.arn]
  ok_actions          = [aws_sns_topic.alarms.arn]
  tags                = var.tags

  metric_query {
    id          = "missing"
    label       = "machines that are missing"
    expression  = "wanted - there"
    return_data = true
  }

  dynamic "metric_query" {
    for_each = { wanted = "GroupDesiredCapacity", there = "GroupInServiceInstances" }

    content {
      id = metric_query.key

      metric {
        namespace   = "AWS/AutoScaling"
        metric_name = metric_query.value
        dimensions  = { AutoScalingGroupName = each.value }
        stat        = metric_query.key == "wanted" ? "Minimum" : "Maximum"
        period      = 300
      }
    }
  }
}

resource "aws_budgets_budget" "month" {
  count = var.budget_usd_per_month > 0 ? 1 : 0

  name         = var.name
  budget_type  = "COST"
  limit_amount = format("%.1f", var.budget_usd_per_month)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  # Of the whole account: filtering by tag works only after the tag was activated for billing, a day later.
  dynamic "notification" {
    for_each = { "ACTUAL" = 80, "FORECASTED" = 100 }

    content {
      comparison_operator       = "GREATER_THAN"
      notification_type         = notification.key
      threshold                 = notification.value
      threshold_type            = "PERCENTAGE"
      subscriber_sns_topic_arns = [aws_sns_topic.alarms.arn]
    }
  }
}
