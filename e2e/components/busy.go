package components

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// scrape reads one controller's metrics.
type scrape struct {
	name string
	read func(context.Context) ([]byte, error)
}

// Busy names the controllers whose workqueues are not empty or who are at work
// on something, by their own metrics, with queue and number. One whose metrics
// cannot be read counts as busy. What a controller will look at again after a
// time is not in its queue, and does not show.
func (i *Installed) Busy(ctx context.Context) ([]string, error) {
	var mu sync.Mutex
	var busy []string
	var wg sync.WaitGroup
	for _, s := range i.scrapes {
		wg.Go(func() {
			found := s.busy(ctx)
			mu.Lock()
			defer mu.Unlock()
			busy = append(busy, found...)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read the controllers' metrics: %w", err)
	}
	slices.Sort(busy)
	return busy, nil
}

func (s scrape) busy(ctx context.Context) []string {
	body, err := s.read(ctx)
	if err != nil {
		return []string{fmt.Sprintf("%s: its metrics can't be read: %v", s.name, err)}
	}
	queues, err := busyQueues(body)
	if err != nil {
		return []string{fmt.Sprintf("%s: its metrics can't be read: %v", s.name, err)}
	}
	for i, queue := range queues {
		queues[i] = s.name + ": " + queue
	}
	return queues
}

// busyQueues finds what is not 0 among the metrics that tell of open work.
func busyQueues(metrics []byte) ([]string, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(metrics))
	if err != nil {
		return nil, err
	}
	var busy []string
	for name, family := range families {
		// KubeVirt prefixes client-go's names.
		metric := strings.TrimPrefix(name, "kubevirt_")
		if metric != "workqueue_depth" && metric != "workqueue_unfinished_work_seconds" && metric != "controller_runtime_active_workers" {
			continue
		}
		for _, m := range family.GetMetric() {
			if value := m.GetGauge().GetValue(); value != 0 {
				busy = append(busy, fmt.Sprintf("%s %s %.3g", label(m), metric, value))
			}
		}
	}
	slices.Sort(busy)
	return busy, nil
}

// label is the queue's or controller's name.
func label(m *dto.Metric) string {
	for _, want := range []string{"name", "controller"} {
		for _, l := range m.GetLabel() {
			if l.GetName() == want {
				return l.GetValue()
			}
		}
	}
	return "?"
}
