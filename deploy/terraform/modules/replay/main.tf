# One auto-scaling group of one machine per shard. With its own volume, a shard keeps every stored item when its
# machine is replaced; without one it fills again from the start.

locals {
  shards = { for i in range(var.shards) : tostring(i) => i }
}

resource "aws_ebs_volume" "this" {
  #checkov:skip=CKV_AWS_189:encrypted with the account's key; items are recreated by playing on
  #checkov:skip=CKV2_AWS_9:a backup of experience that is replaced within hours is worth nothing
  for_each = var.volume_gb > 0 ? local.shards : {}

  availability_zone = var.availability_zones[each.value % length(var.availability_zones)]
  type              = "gp3"
  size              = var.volume_gb
  encrypted         = true
  tags              = merge(var.run.tags, { Name = "${var.run.name}-replay-${each.key}", Role = "replay" })
}

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}

data "aws_iam_policy_document" "volume" {
  for_each = aws_ebs_volume.this

  statement {
    sid       = "TakeOwnVolume"
    actions   = ["ec2:AttachVolume"]
    resources = [each.value.arn]
  }

  statement {
    sid       = "ForMachinesOfThisRun"
    actions   = ["ec2:AttachVolume"]
    resources = ["arn:${data.aws_partition.current.partition}:ec2:${var.run.region}:${data.aws_caller_identity.current.account_id}:instance/*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/Run"
      values   = [var.run.run]
    }
  }

  statement {
    #checkov:skip=CKV_AWS_356:AWS offers no resources for this action
    sid       = "SeeVolumes"
    actions   = ["ec2:DescribeVolumes"]
    resources = ["*"]
  }
}

module "node" {
  source   = "../node"
  for_each = local.shards

  run           = var.run
  machine       = var.machine
  role          = "replay"
  index         = each.value
  host          = "replay-${each.key}"
  instance_type = var.instance_type
  disk_gb       = var.disk_gb
  has_policy    = var.volume_gb > 0
  policy        = var.volume_gb > 0 ? data.aws_iam_policy_document.volume[each.key].json : ""
}

resource "aws_autoscaling_group" "this" {
  for_each = local.shards

  name                      = module.node[each.key].name
  min_size                  = 0
  max_size                  = 1
  desired_capacity          = var.running ? 1 : 0
  vpc_zone_identifier       = [var.subnet_ids[each.value % length(var.subnet_ids)]]
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0"

  launch_template {
    id      = module.node[each.key].launch_template.id
    version = module.node[each.key].launch_template.version
  }

  dynamic "tag" {
    for_each = merge(var.run.tags, { Name = module.node[each.key].name, Role = "replay" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false # the launch template tags machines
    }
  }
}
